/* The shared state of the soft cards: mapping, process slots, memory accounts, events and kernel log lines. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_KMSG_LINE 512

const char *sg_root(void)
{
	const char *root = getenv("KVMPOOL_SOFTGPU");
	return root && *root ? root : "/run/kvmpool-softgpu";
}

static int map_card(struct sg_map *map, int index)
{
	char path[4096];
	struct stat st;

	*map = (struct sg_map){.card = NULL, .fd = -1, .slot = -1};
	if ((size_t)snprintf(path, sizeof(path), "%s/cards/%d.card", sg_root(), index) >= sizeof(path))
		return -ENAMETOOLONG;
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	int rc = -EINVAL;
	if (fstat(fd, &st) || (size_t)st.st_size < sizeof(struct sg_card))
		goto out;
	void *at = mmap(NULL, sizeof(struct sg_card), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED) {
		rc = -errno;
		goto out;
	}
	struct sg_card *card = at;
	if (card->magic != SG_MAGIC || card->version != SG_VERSION || card->size != sizeof(*card)) {
		munmap(at, sizeof(struct sg_card));
		goto out;
	}
	map->card = card;
	map->fd = fd;
	return 0;
out:
	close(fd);
	return rc;
}

int sg_open_all(struct sg_map maps[SG_MAX_CARDS])
{
	int count = 0;

	for (int i = 0; i < SG_MAX_CARDS; i++)
		if (map_card(&maps[count], i) == 0)
			count++;
	for (int i = count; i < SG_MAX_CARDS; i++)
		maps[i] = (struct sg_map){.card = NULL, .fd = -1, .slot = -1};
	return count;
}

void sg_close(struct sg_map *map)
{
	if (!map->card)
		return;
	sg_slot_drop(map);
	munmap(map->card, sizeof(struct sg_card));
	close(map->fd);
	*map = (struct sg_map){.card = NULL, .fd = -1, .slot = -1};
}

/* `command`: F_OFD_SETLK, F_OFD_SETLKW or F_OFD_GETLK; the answer is left in `lock`. */
static int byte_lock(int fd, int command, short type, off_t offset, struct flock *lock)
{
	*lock = (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = offset, .l_len = 1};
	int rc;
	do {
		rc = fcntl(fd, command, lock);
	} while (rc < 0 && errno == EINTR);
	return rc < 0 ? -errno : 0;
}

static uint64_t own_start_ticks(void)
{
	char text[1024] = {0};
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t got = read(fd, text, sizeof(text) - 1);
	close(fd);
	char *at = got > 0 ? strrchr(text, ')') : NULL;
	for (int field = 2; at && field < 22; field++)
		at = strchr(at + 1, ' ');
	return at ? strtoull(at + 1, NULL, 10) : 0;
}

static void own_name(char *name, size_t size)
{
	int fd = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? -1 : read(fd, name, size - 1);
	if (fd >= 0)
		close(fd);
	name[got > 0 ? got : 0] = 0;
	name[strcspn(name, "\n")] = 0;
}

int sg_slot_take(struct sg_map *map)
{
	struct flock lock;

	if (map->slot >= 0)
		return 0;
	for (int i = 0; i < SG_SLOTS; i++) {
		int rc = byte_lock(map->fd, F_OFD_SETLK, F_WRLCK, SG_LOCK_SLOT + i, &lock);
		if (rc == -EAGAIN || rc == -EACCES)
			continue;
		if (rc)
			return rc;
		struct sg_slot *slot = &map->card->slots[i];
		memset(slot, 0, sizeof(*slot));
		own_name(slot->name, sizeof(slot->name));
		slot->start_ticks = own_start_ticks();
		__atomic_store_n(&slot->pid, (uint32_t)getpid(), __ATOMIC_RELEASE);
		map->slot = i;
		return 0;
	}
	return -ENOSPC;
}

struct sg_slot *sg_slot_mine(const struct sg_map *map)
{
	return map->card && map->slot >= 0 ? &map->card->slots[map->slot] : NULL;
}

void sg_slot_drop(struct sg_map *map)
{
	struct sg_slot *slot = sg_slot_mine(map);
	struct flock lock;

	if (!slot)
		return;
	memset(slot, 0, sizeof(*slot));
	byte_lock(map->fd, F_OFD_SETLK, F_UNLCK, SG_LOCK_SLOT + map->slot, &lock);
	map->slot = -1;
}

void sg_slot_forget(struct sg_map *map)
{
	if (map->fd >= 0)
		close(map->fd); /* the lock stays with the parent's copy of the open file */
	map->fd = -1;
	map->slot = -1;
}

bool sg_slot_alive(const struct sg_map *map, int index)
{
	struct flock lock;

	if (index == map->slot)
		return true;
	if (!__atomic_load_n(&map->card->slots[index].pid, __ATOMIC_ACQUIRE))
		return false;
	if (byte_lock(map->fd, F_OFD_GETLK, F_WRLCK, SG_LOCK_SLOT + index, &lock))
		return true; /* cannot tell: do not give its memory away */
	return lock.l_type != F_UNLCK;
}

struct sg_usage sg_usage(const struct sg_map *map)
{
	struct sg_usage usage = {0};

	for (int i = 0; i < SG_SLOTS; i++) {
		if (!sg_slot_alive(map, i))
			continue;
		usage.processes++;
		usage.memory_bytes += __atomic_load_n(&map->card->slots[i].memory_bytes, __ATOMIC_SEQ_CST);
	}
	return usage;
}

int sg_memory_add(struct sg_map *map, uint64_t bytes)
{
	struct sg_slot *slot = sg_slot_mine(map);

	if (!slot)
		return -EBADF;
	if (bytes > map->card->memory_bytes)
		return -ENOMEM;
	__atomic_add_fetch(&slot->memory_bytes, bytes, __ATOMIC_SEQ_CST);
	if (sg_usage(map).memory_bytes <= map->card->memory_bytes)
		return 0;
	__atomic_sub_fetch(&slot->memory_bytes, bytes, __ATOMIC_SEQ_CST);
	return -ENOMEM;
}

void sg_memory_sub(struct sg_map *map, uint64_t bytes)
{
	struct sg_slot *slot = sg_slot_mine(map);

	if (slot)
		__atomic_sub_fetch(&slot->memory_bytes, bytes, __ATOMIC_SEQ_CST);
}

static uint64_t clock_ns(clockid_t id)
{
	struct timespec ts;

	clock_gettime(id, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void push_event(struct sg_map *map, uint32_t xid)
{
	struct sg_card *card = map->card;
	uint64_t seq = card->event_seq + 1;
	struct sg_event *event = &card->events[(seq - 1) % SG_EVENTS];

	__atomic_store_n(&event->seq, 0, __ATOMIC_SEQ_CST);
	event->type = SG_EVENT_XID;
	event->data = xid;
	event->boottime_ns = clock_ns(CLOCK_BOOTTIME);
	event->pid = (uint32_t)getpid();
	own_name(event->name, sizeof(event->name));
	__atomic_store_n(&event->seq, seq, __ATOMIC_SEQ_CST);
	__atomic_store_n(&card->event_seq, seq, __ATOMIC_SEQ_CST);
	__atomic_store_n(&card->last_xid, xid, __ATOMIC_SEQ_CST);
}

/* The sequence number of the next record: one more than the last whole line's. */
static unsigned long next_kmsg_seq(int fd)
{
	char tail[2 * MAX_KMSG_LINE + 1];
	unsigned prio;
	unsigned long seq;
	off_t end = lseek(fd, 0, SEEK_END);
	off_t from = end > 2 * MAX_KMSG_LINE ? end - 2 * MAX_KMSG_LINE : 0;
	ssize_t got = pread(fd, tail, (size_t)(end - from), from);

	if (got <= 0)
		return 0;
	tail[got] = 0;
	if (tail[got - 1] == '\n')
		tail[got - 1] = 0;
	char *line = strrchr(tail, '\n');
	return sscanf(line ? line + 1 : tail, "%u,%lu,", &prio, &seq) == 2 ? seq + 1 : 0;
}

static void append_kmsg(struct sg_map *map, uint32_t xid, const char *detail)
{
	char path[4096], line[MAX_KMSG_LINE], name[24];
	struct flock lock;
	const struct sg_card *card = map->card;

	if ((size_t)snprintf(path, sizeof(path), "%s/kmsg", sg_root()) >= sizeof(path))
		return;
	int fd = open(path, O_RDWR | O_APPEND | O_CLOEXEC);
	if (fd < 0)
		return;
	byte_lock(fd, F_OFD_SETLKW, F_WRLCK, SG_LOCK_EVENTS, &lock);
	own_name(name, sizeof(name));
	int used = snprintf(line, sizeof(line), "3,%lu,%llu,-;NVRM: Xid (PCI:%04x:%02x:%02x): %u, pid=%d, name=%s, %s\n", next_kmsg_seq(fd),
			    (unsigned long long)(clock_ns(CLOCK_MONOTONIC) / 1000), card->pci_domain, card->pci_bus, card->pci_device, xid,
			    (int)getpid(), name, detail);
	if (used > 0 && used < (int)sizeof(line)) {
		ssize_t done = write(fd, line, (size_t)used);
		(void)done; /* a full disk loses a log line, as a full ring would */
	}
	byte_lock(fd, F_OFD_SETLK, F_UNLCK, SG_LOCK_EVENTS, &lock);
	close(fd);
}

void sg_raise_xid(struct sg_map *map, uint32_t xid, const char *detail)
{
	char path[4096];
	struct flock lock;

	if ((size_t)snprintf(path, sizeof(path), "%s/cards/%u.card", sg_root(), map->card->index) >= sizeof(path))
		return;
	int fd = open(path, O_RDWR | O_CLOEXEC); /* its own open file: threads of one process exclude each other too */
	if (fd < 0)
		return;
	byte_lock(fd, F_OFD_SETLKW, F_WRLCK, SG_LOCK_EVENTS, &lock);
	push_event(map, xid);
	append_kmsg(map, xid, detail);
	byte_lock(fd, F_OFD_SETLK, F_UNLCK, SG_LOCK_EVENTS, &lock);
	close(fd);
}
