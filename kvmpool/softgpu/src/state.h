/* One soft card's shared state: a file that every process (libcuda, NVML, Python) maps.
 *
 * The layout is mirrored by kvmpool/softgpu/layout.py and compared by tests/softgpu/test_state.py. No lock here can be
 * held by a dead process: a process owns slot i while it holds an open-file-description lock on byte SG_LOCK_SLOT + i of
 * the file, and whoever adds an event or a kernel log line holds the one on SG_LOCK_EVENTS; the kernel drops both at death,
 * in whichever pid namespace the looker lives. A slot whose byte is not locked is empty, whatever it says.
 */
#ifndef KVMPOOL_SOFTGPU_STATE_H
#define KVMPOOL_SOFTGPU_STATE_H

#include <stdbool.h>
#include <stdint.h>

#define SG_MAGIC 0x55504753u /* "SGPU" */
#define SG_VERSION 1u
#define SG_MAX_CARDS 16
#define SG_SLOTS 256
#define SG_EVENTS 64 /* ring; a reader more than this behind loses the oldest */

#define SG_LOCK_EVENTS 0xfffff  /* bytes beyond the file's end: only ever locked */
#define SG_LOCK_SLOT 0x100000

#define SG_EVENT_XID 8ull      /* as nvmlEventTypeXidCriticalError */
#define SG_EVENT_DBE 2ull      /* as nvmlEventTypeDoubleBitEccError */

struct sg_event {              /* 64 bytes */
	uint64_t seq;          /* 1, 2, ...; written last */
	uint64_t type;         /* SG_EVENT_* */
	uint64_t data;         /* the XID */
	uint64_t boottime_ns;
	uint32_t pid;          /* of the process it is about, 0 unknown */
	uint32_t pad;
	char name[24];
};

struct sg_slot {               /* 128 bytes: one process with a context on this card */
	uint32_t pid;          /* in its own pid namespace */
	uint32_t contexts;
	uint64_t start_ticks;  /* field 22 of /proc/PID/stat */
	uint64_t memory_bytes;
	uint64_t busy_ns;      /* of kernels run */
	uint64_t launches;
	uint64_t copied_bytes;
	char name[64];
	uint64_t pad[2];
};

struct sg_card {
	/* 0: written by whoever creates the card */
	uint32_t magic, version, size, index;
	uint64_t memory_bytes;
	uint32_t pci_domain, pci_bus, pci_device, pci_ids;    /* ids: device << 16 | vendor, as NVML */
	uint32_t pci_subsystem;
	int32_t numa_node;
	uint32_t sm_count, clock_khz, memory_clock_khz, bus_width_bits;
	uint32_t power_limit_mw, compute_major, compute_minor, pad0;
	uint8_t uuid_raw[16];
	char uuid[48];         /* "GPU-8-4-4-4-12" */
	char pci_address[32];  /* "0000:41:00.0" */
	char model[96];
	char driver_version[32];
	char serial[32];
	uint8_t pad1[688];

	/* 1024: faults, written by the injector, read by everybody at each call */
	uint32_t lost;         /* off the bus: 999 for contexts, 15 from NVML */
	uint32_t ecc;          /* XID of an uncontained memory error: new contexts fail with 214 */
	uint32_t hang;         /* launches do not end */
	uint32_t slow;         /* launches take this many times as long; 0 and 1: no fault */
	uint32_t fatal_serial; /* grows when every context that exists now must die ... */
	uint32_t fatal_error;  /* ... with this CUresult */
	uint32_t recovery_action; /* NVML field 230: 0 none 1 reset 2 reboot 3 drain p2p 4 drain and reset */
	uint32_t last_xid;
	uint64_t ecc_uncorrected, ecc_corrected;
	uint32_t fault_serial; /* grows with each injection */
	uint8_t pad2[972];

	/* 2048: figures, added to atomically by processes */
	uint64_t busy_ns;      /* of kernels, all processes that ever were */
	uint64_t launches;
	uint64_t event_seq;    /* of the newest event */
	uint8_t pad3[2024];

	struct sg_event events[SG_EVENTS]; /* 4096 */
	struct sg_slot slots[SG_SLOTS];    /* 8192 */
};

_Static_assert(sizeof(struct sg_event) == 64, "layout");
_Static_assert(sizeof(struct sg_slot) == 128, "layout");
_Static_assert(__builtin_offsetof(struct sg_card, lost) == 1024, "layout");
_Static_assert(__builtin_offsetof(struct sg_card, busy_ns) == 2048, "layout");
_Static_assert(__builtin_offsetof(struct sg_card, events) == 4096, "layout");
_Static_assert(sizeof(struct sg_card) == 8192 + SG_SLOTS * 128, "layout");

struct sg_map {
	struct sg_card *card; /* NULL: no such card */
	int fd;
	int slot;             /* ours, or -1 */
};

struct sg_usage {
	uint64_t memory_bytes;
	uint32_t processes;
};

/* The folder named by KVMPOOL_SOFTGPU, or /run/kvmpool-softgpu. */
const char *sg_root(void);

/* Map cards 0, 1, ... of sg_root() into `maps`, ordered by index; returns how many. A file that is not a card of our version is skipped. */
int sg_open_all(struct sg_map maps[SG_MAX_CARDS]);

void sg_close(struct sg_map *map);

/* Take a process slot; 0, -ENOSPC or -errno. Idempotent. */
int sg_slot_take(struct sg_map *map);

/* Our slot, or NULL. */
struct sg_slot *sg_slot_mine(const struct sg_map *map);

/* Give the slot back (its memory counts no more). */
void sg_slot_drop(struct sg_map *map);

/* In a fork's child: forget the slot without giving back the parent's. */
void sg_slot_forget(struct sg_map *map);

/* True while the process of slot `index` lives. */
bool sg_slot_alive(const struct sg_map *map, int index);

/* Sum over the living. */
struct sg_usage sg_usage(const struct sg_map *map);

/* Count `bytes` more for this process; -ENOMEM (and nothing counted) when the card has not that much left. Lock-free: two
 * processes that ask for the last bytes at the same moment may both be refused, never both served. */
int sg_memory_add(struct sg_map *map, uint64_t bytes);

void sg_memory_sub(struct sg_map *map, uint64_t bytes);

/* Raise `xid` about this process: an event for NVML, a line in kmsg. `detail` follows "NVRM: Xid (PCI:0000:41:00): N, pid=, name=, ". */
void sg_raise_xid(struct sg_map *map, uint32_t xid, const char *detail);

#endif
