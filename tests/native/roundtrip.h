/* Both halves of the data plane in one process, joined by memory: what roundtrip_cases.c (generated) asks of roundtrip.c. */
#ifndef ROUNDTRIP_H
#define ROUNDTRIP_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "cuda_abi.h"
#include "handles.h"
#include "session_driver.h"
#include "shim_api.h"

struct kp_server;
struct kp_work;

enum rt_tail { RT_TAIL_NONE, RT_TAIL_TEXT, RT_TAIL_BYTES };
enum rt_bulk { RT_BULK_NONE, RT_BULK_IN, RT_BULK_OUT };

struct rt_case {
    const char *name;
    uint16_t op;
    int waits, by_hand;
    unsigned numbers, outs;
    enum rt_tail tail;
    enum rt_bulk bulk;
    CUresult (*call)(void); /* NULL: of an op, which has no stub */
};

extern const struct rt_case rt_cases[];
extern const unsigned rt_case_count;
void rt_driver_fill(struct kp_driver *driver);

/* An object that both halves know: the guest's number, the driver's pointer. */
struct rt_object {
    uint64_t number;
    void *object;
};

/* roundtrip.c, for callers: values by the round that is on (all zero, all ones, then random), what must arrive, what came. */
void rt_choose(void *value, size_t bytes);
const char *rt_text(void);
struct rt_object rt_object(enum kp_kind kind, int to_delete);
CUdeviceptr rt_address(CUdeviceptr chosen);
void rt_rectangle(size_t *count, size_t *rows, size_t *pitch, size_t element);
void rt_expect(const char *name, const void *value, size_t bytes);
void rt_called(CUresult rc);
void rt_came(const char *name, const void *value, size_t bytes);
void rt_adopted(const char *name, enum kp_kind kind, uint64_t number);
void rt_let_go(const char *name, uint64_t number, int deleted);

/* For the driver's side: what arrived, and what it answers. */
int rt_tries(uint16_t op); /* whether it is the one at hand: the session asks the driver things of its own, too */
void rt_arrived(const void *value, size_t bytes);
void rt_fill(void *out, size_t bytes);
void *rt_made(void);
CUresult rt_result(void);
size_t rt_bulk_bytes(void);
unsigned char rt_bulk_byte(size_t at);
size_t rt_give_bytes(void);

/* roundtrip_session.c: the session, which reads from memory and writes by kp_write_parts to RT_SESSION_FD. */
#define RT_SESSION_FD 1000001
#define RT_SHIM_FD 1000002
void rt_session_start(uint64_t context);
int rt_session_serve(const unsigned char *bytes, size_t length); /* all of it; the first error */
void rt_session_enter(uint64_t number, enum kp_kind kind, void *object);
void *rt_session_object(uint64_t number, enum kp_kind kind); /* NULL: it has none */
void rt_session_drop(uint64_t number);

#endif
