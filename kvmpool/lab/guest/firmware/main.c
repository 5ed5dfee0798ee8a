/* A guest that is only firmware (QEMU q35): says on COM1 which PCI devices it sees and what the first registers of a card's
 * BAR 0 hold, then READY. From then on it obeys the ACPI power button and the key `q`, and answers the slots of root ports as
 * an operating system's driver does: it powers a card on when one is plugged, and off when its removal is asked for.
 * No Linux, no SeaBIOS: it is up 20 ms after its start, and a shutdown request ends it at once.
 *
 *     PCI 01:00.0 1234:11e8                                    whatever answers; buses are numbered as libvirt numbers them
 *     CARD 01:00.0 1234:11e8 bar c4000000 010000ed fffffffa    a card and its first two registers
 *     PLUGGED 02, UNPLUGGED 02, GONE 02                        a slot, by its bus: card came, removal agreed to, card is away
 */
#include <stdint.h>

enum {
    COM1 = 0x3f8,
    COM1_STATUS = COM1 + 5,
    COM1_DATA_READY = 1,
    PCI_ADDRESS = 0xcf8,
    PCI_DATA = 0xcfc,
    LPC = 0x1f << 3,    /* ICH9's LPC bridge, 00:1f.0 (QEMU, hw/isa/lpc_ich9.c) */
    LPC_PMBASE = 0x40,
    LPC_ACPI_CONTROL = 0x44,
    PM_BASE = 0x600,    /* where we put it */
    PM_STATUS = PM_BASE,
    PM_ENABLE = PM_BASE + 2,
    PM_CONTROL = PM_BASE + 4,
    POWER_BUTTON = 1 << 8,
    SOFT_OFF = 1 << 13,
    PIC1 = 0x20,
    PIC2 = 0xa0,
    PIT = 0x40,
    TIMER_VECTOR = 0x40,

    /* PCI Local Bus 3.0, chapter 6; PCI-to-PCI Bridge 1.2, chapter 3 */
    PCI_COMMAND = 0x04,
    COMMAND_MEMORY_MASTER = 6,
    HAS_CAPABILITIES = 1 << 20,     /* of the register at PCI_COMMAND */
    PCI_CLASS = 0x08,
    CLASS_BRIDGE = 0x0604,
    PCI_HEADER = 0x0c,
    HEADER_MULTIFUNCTION = 1 << 23,
    PCI_BAR0 = 0x10,
    BAR_IO = 1,
    BAR_TYPE = 6,
    BAR_64_BIT = 4,
    PCI_BUSES = 0x18,
    PCI_MEMORY_WINDOW = 0x20,
    PCI_CAPABILITIES = 0x34,

    /* PCI Express Base 4.0, 7.5.3: the capability of a root port */
    CAPABILITY_EXPRESS = 0x10,
    SLOT_IMPLEMENTED = 1 << 24,     /* of the register at its start */
    SLOT_CONTROL = 0x18,
    SLOT_STATUS = 0x1a,
    INDICATOR_ON = 1 << 8,
    INDICATOR_OFF = 3 << 8,
    POWER_OFF = 1 << 10,
    SLOT_POWER = INDICATOR_OFF | POWER_OFF,
    SLOT_EVENTS = 0x1f,             /* of the status: those that are set are cleared by writing them back */
    BUTTON_PRESSED = 1 << 0,
    PRESENCE_CHANGED = 1 << 3,
    CARD_PRESENT = 1 << 6,

    VIRTIO = 0x1af4,                /* the vendor of what a guest has besides cards */
    EDU = 0x11e81234,               /* QEMU, docs/specs/edu.txt: what is written to its register 4 reads inverted */
    SLOTS_MAX = 14,
    WINDOW_BYTES = 64 << 20,        /* of memory a bus, from WINDOWS on: the last one ends at 0xfc000000 */
};

#define WINDOWS 0xc0000000u

struct slot {
    uint32_t port;      /* the root port's device number */
    uint32_t express;   /* where its capability is */
    uint32_t known;     /* a card was there when we last looked */
};

/* What is written lives at fixed places: a ROM has no data. */
#define SLOTS ((struct slot *)0x10000)
#define SLOT_COUNT (*(uint32_t *)0x18000)
#define IDT ((volatile uint32_t *)0x8000)
#define LOCAL_APIC_SPURIOUS (*(volatile uint32_t *)0xfee000f0)
#define LOCAL_APIC_LINT0 (*(volatile uint32_t *)0xfee00350)

void timer_interrupt(void);
void main(void);

static void out8(uint16_t port, uint8_t value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static void out16(uint16_t port, uint16_t value)
{
    __asm__ volatile("outw %0, %1" : : "a"(value), "Nd"(port));
}

static void out32(uint16_t port, uint32_t value)
{
    __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"(port));
}

static uint8_t in8(uint16_t port)
{
    uint8_t value;

    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static uint16_t in16(uint16_t port)
{
    uint16_t value;

    __asm__ volatile("inw %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static uint32_t in32(uint16_t port)
{
    uint32_t value;

    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static uint32_t pci_read(uint32_t device, uint32_t offset)
{
    out32(PCI_ADDRESS, 0x80000000u | device << 8 | offset);
    return in32(PCI_DATA);
}

static void pci_write(uint32_t device, uint32_t offset, uint32_t value)
{
    out32(PCI_ADDRESS, 0x80000000u | device << 8 | offset);
    out32(PCI_DATA, value);
}

/* A slot's control and its status are written apart: QEMU takes the bits of one word for those of the other. */
static uint32_t pci_read16(uint32_t device, uint32_t offset)
{
    return pci_read(device, offset & ~3u) >> (offset & 2) * 8 & 0xffff;
}

static void pci_write16(uint32_t device, uint32_t offset, uint32_t value)
{
    out32(PCI_ADDRESS, 0x80000000u | device << 8 | (offset & ~3u));
    out16(PCI_DATA + (offset & 2), value);
}

static void say(const char *text)
{
    while (*text)
        out8(COM1, *text++);
}

static void say_hex(uint32_t value, int digits)
{
    while (digits--)
        out8(COM1, "0123456789abcdef"[value >> 4 * digits & 15]);
}

static void say_device(const char *what, uint32_t device, uint32_t ids)
{
    say(what);
    say_hex(device >> 8, 2);
    say(":");
    say_hex(device >> 3 & 31, 2);
    say(".");
    say_hex(device & 7, 1);
    say(" ");
    say_hex(ids & 0xffff, 4);
    say(":");
    say_hex(ids >> 16, 4);
}

/* Place BAR 0 at the next free address of its bus's window and read what is there. */
static void read_card(uint32_t device, uint32_t ids, uint32_t *free)
{
    uint32_t kind = pci_read(device, PCI_BAR0), size, end = WINDOWS + ((device >> 8) + 1) * WINDOW_BYTES;
    volatile uint32_t *registers;

    say_device("CARD ", device, ids);
    pci_write(device, PCI_BAR0, 0xffffffff);
    size = ~(pci_read(device, PCI_BAR0) & ~0xfu) + 1;
    if (kind & BAR_IO || size < 16 || size > WINDOW_BYTES) {
        say(" bar -\r\n");
        return;
    }
    *free = (*free + size - 1) & ~(size - 1);
    if (*free + size > end) {
        say(" bar does not fit\r\n");
        return;
    }
    pci_write(device, PCI_BAR0, *free);
    if ((kind & BAR_TYPE) == BAR_64_BIT)
        pci_write(device, PCI_BAR0 + 4, 0);
    pci_write(device, PCI_COMMAND, COMMAND_MEMORY_MASTER);
    registers = (volatile uint32_t *)*free;
    if (ids == EDU)
        registers[1] = 5;
    say(" bar ");
    say_hex(*free, 8);
    say(" ");
    say_hex(registers[0], 8);
    say(" ");
    say_hex(registers[1], 8);
    say("\r\n");
    *free += size;
}

static uint32_t capability(uint32_t device, uint32_t wanted)
{
    uint32_t offset, left = 48;

    if (!(pci_read(device, PCI_COMMAND) & HAS_CAPABILITIES))
        return 0;
    for (offset = pci_read(device, PCI_CAPABILITIES) & 0xfc; offset && left--; offset = pci_read(device, offset) >> 8 & 0xfc)
        if ((pci_read(device, offset) & 0xff) == wanted)
            return offset;
    return 0;
}

/* What a root port leads to: buses are numbered in the order of the ports, as libvirt numbers their controllers. */
static uint32_t bus_behind(uint32_t device)
{
    return pci_read(device, PCI_BUSES) >> 8 & 0xff;
}

static void open_port(uint32_t device, uint32_t express)
{
    struct slot *slot = &SLOTS[SLOT_COUNT++];
    uint32_t bus = SLOT_COUNT, window = WINDOWS + bus * WINDOW_BYTES;

    pci_write(device, PCI_BUSES, bus << 16 | bus << 8);
    pci_write(device, PCI_MEMORY_WINDOW, ((window + WINDOW_BYTES - 1) & 0xfff00000) | window >> 16);
    pci_write(device, PCI_COMMAND, COMMAND_MEMORY_MASTER);
    *slot = (struct slot){ device, express, 0 };
}

static void look_at(uint32_t device, uint32_t *free)
{
    uint32_t ids = pci_read(device, 0), express;

    if ((ids & 0xffff) == 0xffff)
        return;
    say_device("PCI ", device, ids);
    say("\r\n");
    if (pci_read(device, PCI_CLASS) >> 16 != CLASS_BRIDGE) {
        if (device >> 8 && (ids & 0xffff) != VIRTIO)
            read_card(device, ids, free);
        return;
    }
    express = capability(device, CAPABILITY_EXPRESS);
    if (express && pci_read(device, express) & SLOT_IMPLEMENTED && SLOT_COUNT < SLOTS_MAX && device >> 8 == 0)
        open_port(device, express);
}

/* `devices` of the bus, each with its functions: a slot of PCI Express has one. */
static void list_bus(uint32_t bus, uint32_t devices)
{
    uint32_t free = WINDOWS + bus * WINDOW_BYTES;

    for (uint32_t device = bus << 8; device < (bus << 8) + devices * 8; device += 8) {
        look_at(device, &free);
        if (pci_read(device, PCI_HEADER) & HEADER_MULTIFUNCTION && pci_read(device, 0) != 0xffffffff)
            for (uint32_t function = 1; function < 8; function++)
                look_at(device + function, &free);
    }
}

static void list_devices(void)
{
    SLOT_COUNT = 0;
    list_bus(0, 32);
    for (struct slot *slot = SLOTS; slot < SLOTS + SLOT_COUNT; slot++) {
        uint32_t status = pci_read16(slot->port, slot->express + SLOT_STATUS);

        pci_write16(slot->port, slot->express + SLOT_STATUS, status & SLOT_EVENTS);
        slot->known = status & CARD_PRESENT;
        list_bus(bus_behind(slot->port), 1);
    }
}

static void say_slot(const char *what, const struct slot *slot)
{
    say(what);
    say_hex(bus_behind(slot->port), 2);
    say("\r\n");
}

/* Answer what happened in a slot. An event is cleared by writing it back. */
static void serve_slot(struct slot *slot)
{
    uint32_t where = slot->express + SLOT_CONTROL, status = pci_read16(slot->port, slot->express + SLOT_STATUS);
    uint32_t control = pci_read16(slot->port, where) & ~SLOT_POWER, here = status & CARD_PRESENT;

    if (!(status & (BUTTON_PRESSED | PRESENCE_CHANGED)))
        return;
    pci_write16(slot->port, slot->express + SLOT_STATUS, status & SLOT_EVENTS);
    if (here && !slot->known) {
        slot->known = here;
        pci_write16(slot->port, where, control | INDICATOR_ON);
        list_bus(bus_behind(slot->port), 1);
        say_slot("PLUGGED ", slot);
    } else if (here && status & BUTTON_PRESSED) {
        slot->known = 0;
        say_slot("UNPLUGGED ", slot);
        pci_write16(slot->port, where, control | SLOT_POWER);
    } else if (!here && slot->known) {
        slot->known = 0;
        say_slot("GONE ", slot);
        pci_write16(slot->port, where, control | SLOT_POWER);
    }
}

static void enable_power_button(void)
{
    pci_write(LPC, LPC_PMBASE, PM_BASE | 1);
    pci_write(LPC, LPC_ACPI_CONTROL, pci_read(LPC, LPC_ACPI_CONTROL) | 0x80);
    out16(PM_ENABLE, POWER_BUTTON);
}

/* The PIT at its slowest (18 Hz) through the first PIC, so that hlt returns now and then: a guest that polls without it
 * would keep a whole core of the machine busy. */
static void start_timer(void)
{
    uint32_t handler = (uint32_t)timer_interrupt;
    struct {
        uint16_t limit;
        uint32_t base;
    } __attribute__((packed)) table = { (TIMER_VECTOR + 1) * 8 - 1, (uint32_t)IDT };

    IDT[TIMER_VECTOR * 2] = 0x08u << 16 | (handler & 0xffff);
    IDT[TIMER_VECTOR * 2 + 1] = (handler & 0xffff0000) | 0x8e00;
    __asm__ volatile("lidt %0" : : "m"(table));
    out8(PIC1, 0x11);
    out8(PIC1 + 1, TIMER_VECTOR);
    out8(PIC1 + 1, 4);
    out8(PIC1 + 1, 1);
    out8(PIC1 + 1, 0xfe);   /* only the timer */
    out8(PIC2 + 1, 0xff);
    out8(PIT + 3, 0x34);
    out8(PIT, 0xff);
    out8(PIT, 0xff);
    LOCAL_APIC_SPURIOUS = 0x1ff;
    LOCAL_APIC_LINT0 = 0x700;   /* ExtINT: what the PIC says */
    __asm__ volatile("sti");
}

void main(void)
{
    out8(COM1 + 1, 0);  /* no interrupts, 8 bits, lines up */
    out8(COM1 + 3, 3);
    out8(COM1 + 4, 3);
    say("BOOTED firmware\r\n");
    list_devices();
    enable_power_button();
    start_timer();
    say("READY\r\n");
    for (;;) {
        int off = in16(PM_STATUS) & POWER_BUTTON;

        for (struct slot *slot = SLOTS; slot < SLOTS + SLOT_COUNT; slot++)
            serve_slot(slot);
        if (in8(COM1_STATUS) & COM1_DATA_READY)
            off |= in8(COM1) == 'q';
        if (off) {
            say("OFF\r\n");
            out16(PM_CONTROL, SOFT_OFF);
        }
        __asm__ volatile("hlt");
    }
}
