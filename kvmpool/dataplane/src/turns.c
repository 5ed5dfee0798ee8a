/* turns.c: see turns.h. */
#define _GNU_SOURCE
#include "turns.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOCK_SEAT 0x100000 /* bytes of the file beyond its end, that are only ever locked */

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* By an open-file-description lock of one byte, which ends with the worker. */
static int lock_seat(int fd, unsigned seat)
{
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_SEAT + (off_t)seat, .l_len = 1 };
    int rc;

    do
        rc = fcntl(fd, F_OFD_SETLK, &lock);
    while (rc && errno == EINTR);
    return rc;
}

static int take_seat(struct kp_turns *turns)
{
    for (unsigned i = 0; i < KP_TURNS_CLAIMS; i++) {
        struct kp_turns_claim *claim = &turns->page->claim[i];

        if (lock_seat(turns->fd, i))
            continue;
        for (unsigned slot = 0; slot < KP_ACCOUNT_SLOTS; slot++)
            atomic_store(&claim->wish_ns[slot], 0);
        atomic_store(&claim->closed_until_ns, 0);
        atomic_store(&claim->used_ns, 0);
        atomic_store(&claim->tag_ns, atomic_load(&turns->page->now_tag_ns));
        atomic_store(&claim->taken, 1);
        turns->seat = i;
        return 0;
    }
    return -EUSERS;
}

int kp_turns_open(struct kp_turns *turns, const char *path, uint32_t weight_percent, uint32_t limit_percent)
{
    struct kp_turns_page *page;
    int rc = 0;

    *turns = (struct kp_turns){
        .fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600),
        .weight = weight_percent ? weight_percent : 1,
        .limit_percent = limit_percent ? limit_percent : 100,
    };
    if (turns->fd < 0)
        return -errno;
    if (ftruncate(turns->fd, sizeof(*page))) { /* what is there stays */
        rc = -errno;
        goto out;
    }
    page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, turns->fd, 0);
    if (page == MAP_FAILED) {
        rc = -errno;
        goto out;
    }
    turns->page = page;
    atomic_store(&page->magic, KP_TURNS_MAGIC);
    turns->closed_until_ns = mmap(NULL, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    rc = turns->closed_until_ns == MAP_FAILED ? -ENOMEM : take_seat(turns);
    if (rc)
        munmap(page, sizeof(*page));
out:
    if (rc) {
        close(turns->fd);
        *turns = (struct kp_turns){ .fd = -1 };
    }
    return rc;
}

int kp_turns_join(struct kp_turns *turns, unsigned slot)
{
    char path[32];
    int fd;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", turns->fd);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    turns->fd = fd;
    turns->slot = slot;
    return 0;
}

void kp_turns_forget(struct kp_turns *turns, unsigned slot)
{
    atomic_store(&turns->page->claim[turns->seat].wish_ns[slot], 0);
}

static int wishes(const struct kp_turns_claim *claim, unsigned slot, uint64_t now)
{
    uint64_t wish = atomic_load(&claim->wish_ns[slot]);

    return wish && now - wish < KP_TURN_FRESH_NS;
}

static int claim_wishes(const struct kp_turns_claim *claim, uint64_t now)
{
    if (!atomic_load(&claim->taken) || atomic_load(&claim->closed_until_ns) > now)
        return 0;
    for (unsigned slot = 0; slot < KP_ACCOUNT_SLOTS; slot++)
        if (wishes(claim, slot, now))
            return 1;
    return 0;
}

/* A claim's virtual time as it counts now: one that was away for long does not come back with all that it did not use. */
static uint64_t tag_of(const struct kp_turns_page *page, unsigned seat)
{
    uint64_t tag = atomic_load(&page->claim[seat].tag_ns), now_tag = atomic_load(&page->now_tag_ns);

    now_tag -= now_tag < KP_TURN_CREDIT_NS ? now_tag : KP_TURN_CREDIT_NS;

    return tag > now_tag ? tag : now_tag;
}

/* Whether no other claim that wants the card is before ours, nor a session of ours before us. */
static int is_next(const struct kp_turns *turns, uint64_t now)
{
    const struct kp_turns_page *page = turns->page;
    const struct kp_turns_claim *own = &page->claim[turns->seat];
    uint64_t mine = tag_of(page, turns->seat);
    unsigned slot = atomic_load(&own->last_slot) % KP_ACCOUNT_SLOTS;

    for (unsigned i = 0; i < KP_TURNS_CLAIMS; i++) {
        uint64_t tag = tag_of(page, i);

        if (i != turns->seat && (tag < mine || (tag == mine && i < turns->seat)) && claim_wishes(&page->claim[i], now))
            return 0;
    }
    for (unsigned n = 0; n < KP_ACCOUNT_SLOTS; n++) {
        slot = (slot + 1) % KP_ACCOUNT_SLOTS;
        if (slot == turns->slot || wishes(own, slot, now))
            return slot == turns->slot;
    }
    return 1;
}

static void wait_for_bell(struct kp_turns *turns, uint32_t heard, uint64_t until_ns, uint64_t now)
{
    uint64_t tick = until_ns > now && until_ns - now < KP_TURN_TICK_NS ? until_ns - now : KP_TURN_TICK_NS;
    struct timespec wait = { .tv_nsec = (long)tick };

    syscall(SYS_futex, &turns->page->bell, FUTEX_WAIT, heard, &wait, NULL, 0);
}

static void begin(struct kp_turns *turns)
{
    struct kp_turns_claim *own = &turns->page->claim[turns->seat];
    uint64_t tag = tag_of(turns->page, turns->seat);

    atomic_store(&own->tag_ns, tag);
    atomic_store(&own->last_slot, turns->slot);
    atomic_store(&turns->page->now_tag_ns, tag);
}

int kp_turns_take(struct kp_turns *turns)
{
    struct kp_turns_claim *own = &turns->page->claim[turns->seat];
    uint64_t since = now_ns();
    int rc = -ETIMEDOUT;

    while (!turns->free) {
        uint64_t now = now_ns(), closed = atomic_load(turns->closed_until_ns);
        uint32_t heard = atomic_load(&turns->page->bell);

        atomic_store(&own->wish_ns[turns->slot], now);
        if (closed > now) {
            since = now; /* its own limit is no neighbour's fault */
        } else if (is_next(turns, now) && !flock(turns->fd, LOCK_EX | LOCK_NB)) {
            begin(turns);
            rc = 0;
            break;
        } else if (now - since > KP_TURN_WAIT_NS) {
            break;
        }
        wait_for_bell(turns, heard, closed, now);
    }
    atomic_store(&own->wish_ns[turns->slot], 0);
    return rc;
}

int kp_turns_due(struct kp_turns *turns)
{
    uint64_t now = now_ns();

    if (turns->free)
        return 0;
    if (atomic_load(turns->closed_until_ns) > now || !is_next(turns, now))
        return 1;
    begin(turns);
    return 0;
}

int kp_turns_shared(const struct kp_turns *turns)
{
    const struct kp_turns_claim *own = &turns->page->claim[turns->seat];
    uint64_t now = now_ns();

    if (turns->free || turns->limit_percent < 100)
        return !turns->free;
    for (unsigned i = 0; i < KP_TURNS_CLAIMS; i++)
        if (i != turns->seat && claim_wishes(&turns->page->claim[i], now))
            return 1;
    for (unsigned slot = 0; slot < KP_ACCOUNT_SLOTS; slot++)
        if (slot != turns->slot && wishes(own, slot, now))
            return 1;
    return 0;
}

void kp_turns_charge(struct kp_turns *turns, uint64_t ns)
{
    struct kp_turns_claim *own = &turns->page->claim[turns->seat];
    uint64_t now = now_ns(), back = ns + KP_TURN_LATE_NS, closed = atomic_load(turns->closed_until_ns);
    uint64_t from = now - (back < now ? back : now);

    atomic_fetch_add(&own->used_ns, ns);
    atomic_fetch_add(&own->tag_ns, ns * 100 / turns->weight);
    if (turns->limit_percent < 100) { /* what was used pays for the time since it began, or since it might have */
        closed = (closed > from ? closed : from) + ns * 100 / turns->limit_percent;
        atomic_store(turns->closed_until_ns, closed);
        atomic_store(&own->closed_until_ns, closed);
    }
}

void kp_turns_leave(struct kp_turns *turns)
{
    flock(turns->fd, LOCK_UN);
    atomic_fetch_add(&turns->page->bell, 1);
    syscall(SYS_futex, &turns->page->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void kp_turns_wish(struct kp_turns *turns)
{
    atomic_store(&turns->page->claim[turns->seat].wish_ns[turns->slot], now_ns());
}

uint64_t kp_turns_used(const struct kp_turns *turns)
{
    return turns->page ? atomic_load(&turns->page->claim[turns->seat].used_ns) : 0;
}
