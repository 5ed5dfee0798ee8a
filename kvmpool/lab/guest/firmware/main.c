/* A guest that is only firmware (QEMU q35): says on COM1 which PCI devices it sees, then READY, then obeys the ACPI power
 * button and the key `q`. No Linux, no SeaBIOS: it is up 20 ms after its start, and a shutdown request ends it at once. */
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
};

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

/* The devices of bus 0; those behind bridges have no bus number yet. */
static void list_devices(void)
{
    for (uint32_t device = 0; device < 256; device++) {
        uint32_t ids = pci_read(device, 0);

        if ((ids & 0xffff) == 0xffff)
            continue;
        say("PCI 00:");
        say_hex(device >> 3, 2);
        say(".");
        say_hex(device & 7, 1);
        say(" ");
        say_hex(ids & 0xffff, 4);
        say(":");
        say_hex(ids >> 16, 4);
        say("\r\n");
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

        if (in8(COM1_STATUS) & COM1_DATA_READY)
            off |= in8(COM1) == 'q';
        if (off) {
            say("OFF\r\n");
            out16(PM_CONTROL, SOFT_OFF);
        }
        __asm__ volatile("hlt");
    }
}
