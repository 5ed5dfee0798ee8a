/* The wire between shim, relay and worker: framing, hello and welcome.
 *
 * Little-endian. A frame is a 16-byte header and a body of at most KP_BODY_MAX bytes. The first frame of a
 * connection is HELLO (guest -> relay -> worker), the answer WELCOME (worker's session -> guest). After a welcome
 * with status 0 the guest sends calls (op >= KP_OP_CALLS, numbered by calls.toml), each followed by its DATA frames
 * where it carries bulk; the worker answers those with KP_FLAG_REPLY by DATA frames and one REPLY of the same seq.
 *
 * The checks here trust no byte: a structure that passed its check has terminated strings and values in range.
 * This module does not know about CUDA or about who is allowed to connect.
 */
#ifndef KVMPOOL_FRAME_H
#define KVMPOOL_FRAME_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvmpool's wire is little-endian and is not converted"
#endif

#define KP_WIRE_VERSION 1u
#define KP_MAGIC 0x4B51u /* "KP" with the wire version added */
#define KP_HEADER_BYTES 16u
#define KP_BODY_MAX (1u << 20)   /* bytes of one body; bulk is cut into DATA frames of at most this */
#define KP_PORT 9960u            /* of the acceptor, on vsock */
#define KP_VA_WINDOW (1ull << 40) /* bytes of device addresses a session may use, from va_base */
#define KP_VA_PAGE (1ull << 21)   /* va_base, and every mapping, is a multiple of this */
#define KP_VA_MIN (1ull << 32)
#define KP_VA_MAX (1ull << 47)
#define KP_DEVICE_MAX (1ull << 40) /* bytes of a device of shared memory */

enum kp_op {
    KP_OP_HELLO = 1,
    KP_OP_WELCOME = 2,
    KP_OP_REPLY = 3, /* worker -> guest: struct kp_reply_head, out values, out bytes */
    KP_OP_DATA = 4,  /* bulk of the call with the same seq, either way */
    KP_OP_BYE = 5,   /* guest -> worker, empty: the process ends; free everything */
    KP_OP_CONTEXT = 6, /* guest -> worker: u64 context handle that the following calls run in */
    KP_OP_FIGURES = 7, /* observer -> worker, empty; the answer has a struct kp_figures */
    KP_OP_PRINTED = 8, /* worker -> guest: what kernels printed, any bytes; in front of the REPLY of the same seq */
    KP_OP_ASSERTED = 9, /* likewise, what is for the standard error: the text of their assertions */
    KP_OP_CALLS = 16,  /* first op of calls.toml */
    KP_OP_MAX = 1024,
};

#define KP_HELLO_WINDOW 1u
#define KP_HELLO_OBSERVER 2u
#define KP_HELLO_DEVICE 4u
#define KP_HELLO_FLAGS_KNOWN (KP_HELLO_WINDOW | KP_HELLO_OBSERVER | KP_HELLO_DEVICE)

#define KP_PRINT_MAX (4u << 20) /* bytes of kernels' text of either kind that are kept for one reply; of more, the oldest go */
#define KP_FIGURE_PROCESSES 64u /* of one claim at once */

#define KP_FLAG_REPLY 1u /* the guest waits for a REPLY */
#define KP_FLAGS_KNOWN KP_FLAG_REPLY

struct kp_frame {
    uint16_t magic;
    uint16_t op;
    uint16_t flags;
    uint16_t zero;
    uint32_t length; /* of the body */
    uint32_t seq;    /* the guest's, wraps */
};
_Static_assert(sizeof(struct kp_frame) == KP_HEADER_BYTES, "frame header");

struct kp_reply_head {
    int32_t result; /* a CUresult: this call's, or the first earlier asynchronous one of its context that nobody was told of */
    int32_t sticky; /* a CUresult that every later call in the context gets until that is gone, or 0 */
};

struct kp_hello {
    uint32_t wire_version;
    uint8_t caps_hash[16]; /* of the op table the guest was built with */
    char claim[32];        /* "gpu0"; letters, digits, '-', '_' */
    char token[64];        /* empty on vsock and unix */
    uint32_t pid;          /* in the guest; for logs only */
    uint32_t flags;        /* KP_HELLO_WINDOW: may be sent a window of shared memory with the welcome; */
                           /* KP_HELLO_DEVICE: sees a PCI device of shared memory, and may be told its place in it; */
                           /* KP_HELLO_OBSERVER: makes no calls, only asks for figures; caps_hash is not looked at */
    uint64_t nonce;        /* differs for each guest process; for logs and a later RESUME */
    uint64_t va_base;      /* first device address of this session */
    char program[64];      /* the guest's word, for logs only */
} __attribute__((packed));
_Static_assert(sizeof(struct kp_hello) == 204, "hello");

struct kp_welcome {
    int32_t status;        /* 0 or a negative errno: -EPROTO other build, -EACCES token, -ENOENT no such claim, */
                           /* -EAGAIN nobody serves the claim now, -ENOMEM, -ENODEV the card does not answer */
    uint8_t caps_hash[16]; /* of the worker's op table */
    uint8_t uuid[16];      /* the claim's virtual GPU: constant over rebinds */
    char pci[16];          /* likewise, "0000:41:00.0" */
    uint64_t memory_bytes; /* of the claim */
    uint64_t keepalive;    /* milliseconds between pings, 0: none */
    uint8_t device[16];    /* which device of shared memory (slots.h) has this process's window, */
    uint64_t window_at;    /* and where in it */
    uint64_t window_bytes; /* 0: it has none there */
    char text[160];        /* why, one line, where status is not 0 */
} __attribute__((packed));
_Static_assert(sizeof(struct kp_welcome) == 260, "welcome");

struct kp_figure_process {
    uint32_t pid; /* in the guest, its own word */
    uint32_t zero;
    uint64_t memory_bytes;
};

/* How the claim's card does now. */
struct kp_figures {
    uint64_t memory_used; /* bytes, over all sessions of the claim */
    uint64_t busy_ns;     /* that the card worked for the claim since its worker began */
    uint64_t now_ns;      /* on the clock that began no later */
    int32_t cuda_version; /* of the card's driver, 13000 is 13.0 */
    int32_t major, minor; /* compute capability */
    int32_t multiprocessors;
    uint32_t busy_known; /* 0: nothing is measured and busy_ns stays 0 */
    uint32_t processes;  /* how many of `process` are filled */
    char name[96];       /* of the card's model */
    char driver[32];     /* its driver's version, "580.65.06"; empty: not known */
    struct kp_figure_process process[KP_FIGURE_PROCESSES];
};
_Static_assert(sizeof(struct kp_figures) == 176 + 16 * KP_FIGURE_PROCESSES, "figures");

/* 0, or -EPROTO where the 16 bytes are no header of this wire version or announce a body beyond its op's maximum. */
int kp_frame_check(const void *header, struct kp_frame *out);

/* 0, or -EPROTO where a value of the body is out of range or a text not terminated printable ASCII. */
int kp_hello_check(const void *body, size_t length, struct kp_hello *out);
int kp_welcome_check(const void *body, size_t length, struct kp_welcome *out);
int kp_figures_check(const void *body, size_t length, struct kp_figures *out);

/* A claim's name as it may stand in a hello. */
int kp_claim_name_check(const char *name, size_t room);

/* 0, -ECONNRESET where the peer closed before `length` bytes (also at once), -EPROTO, or another negative errno. */
int kp_read_full(int fd, void *buffer, size_t length);
int kp_write_full(int fd, const void *buffer, size_t length); /* raises no SIGPIPE */

/* Gives a unix socket room for a frame of bulk on its way: with the kernel's 208 KiB both sides of a copy sleep and are woken
 * twice a frame, because a writer is woken only once three quarters are read. As much as the caller may; others are left alone. */
void kp_socket_widen(int fd);

int kp_write_parts(int fd, const struct iovec *part, int parts); /* at most two, as one */

/* One frame; `out` holds at least `room` bytes and a longer body is -EPROTO. Blocking. */
int kp_frame_read(int fd, struct kp_frame *frame, void *body, size_t room);
int kp_frame_write(int fd, uint16_t op, uint16_t flags, uint32_t seq, const void *body, uint32_t length);

/* The first frame of a connection, checked; kp_welcome_write fills op and magic itself. */
int kp_hello_read(int fd, struct kp_hello *out);
int kp_hello_write(int fd, const struct kp_hello *hello);
int kp_welcome_read(int fd, struct kp_welcome *out);
int kp_welcome_write(int fd, const struct kp_welcome *welcome);

#endif
