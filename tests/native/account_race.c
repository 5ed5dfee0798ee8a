/* account_race.c: many processes charge and release one account, some die in the middle: the limit holds at every moment, a large
 * request that cannot fit never makes a neighbour's small one fail, and nothing is left over.
 *
 * Prints one line "ok ..." and leaves with 0, or says what broke and leaves with 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"

#define LIMIT 1000000u
#define PROCESSES 8u
#define ROUNDS 20000u
#define LIVES 30u

/* What the processes believe they hold, added after a charge and taken away before its release: never above the truth. */
static _Atomic uint64_t *held;

static void fail(const char *what)
{
    printf("%s\n", what);
    exit(1);
}

static void one_process(struct kp_account *account, unsigned slot)
{
    unsigned seed = slot * 2654435761u + (unsigned)getpid();

    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t bytes = 1 + (unsigned)rand_r(&seed) % (LIMIT / 4);
        int rc = kp_account_charge(account, slot, bytes);

        if (rc == -ENOMEM)
            continue;
        if (rc || atomic_fetch_add(held, bytes) + bytes > LIMIT)
            fail("the limit was passed");
        atomic_fetch_sub(held, bytes);
        kp_account_release(account, slot, bytes);
    }
    exit(0);
}

static void the_limit_holds(struct kp_account *account)
{
    int status;

    for (unsigned slot = 0; slot < PROCESSES; slot++)
        if (fork() == 0)
            one_process(account, slot);
    while (wait(&status) > 0)
        if (status)
            fail("a process saw the limit passed");
    if (kp_account_used(account))
        fail("something is left after all released");
}

static void the_killed_leave_nothing(struct kp_account *account)
{
    for (unsigned life = 0; life < LIVES; life++) {
        pid_t pid = fork();

        if (pid == 0)
            one_process(account, 3);
        usleep(500 + life * 37);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        kp_account_clear(account, 3);
        if (kp_account_used(account))
            fail("a killed process left something");
        atomic_store(held, 0);
    }
}

/* The neighbour asks for the impossible all the time; what fits is granted every time. */
static void the_greedy_disturb_nobody(struct kp_account *account)
{
    pid_t pid;

    if (kp_account_charge(account, 2, LIMIT / 4)) /* so that the whole never fits */
        fail("a quarter of an empty account was refused");
    pid = fork();
    if (pid == 0)
        for (;;)
            if (kp_account_charge(account, 1, UINT64_MAX) != -ENOMEM || kp_account_charge(account, 1, LIMIT) != -ENOMEM)
                _exit(1);
    for (unsigned i = 0; i < ROUNDS; i++) {
        if (kp_account_charge(account, 0, LIMIT / 2))
            fail("a greedy neighbour made a fitting request fail");
        kp_account_release(account, 0, LIMIT / 2);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    kp_account_clear(account, 2);
}

int main(void)
{
    struct kp_account *account = kp_account_new(LIMIT);

    held = mmap(NULL, sizeof(*held), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!account || held == MAP_FAILED || kp_account_new(UINT64_MAX))
        fail("no account");
    if (kp_account_charge(account, KP_ACCOUNT_SLOTS, 1) != -EINVAL || kp_account_clear(account, KP_ACCOUNT_SLOTS))
        fail("a slot that does not exist was taken");
    the_limit_holds(account);
    the_killed_leave_nothing(account);
    the_greedy_disturb_nobody(account);
    if (kp_account_charge(account, 0, LIMIT) || kp_account_charge(account, 1, 1) != -ENOMEM)
        fail("the whole is not the whole");
    kp_account_release(account, 0, UINT64_MAX);
    if (kp_account_used(account))
        fail("releasing too much did not empty the slot");
    printf("ok: %u processes, %u rounds, %u killed\n", PROCESSES, ROUNDS, LIVES);
    return 0;
}
