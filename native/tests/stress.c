/* Many threads in several processes on one region, and one table: what is granted never passes the limit, and at the
 * end nothing is left. Built with ThreadSanitizer by `make check-threads`.
 *
 *     stress REGION PROCESSES THREADS ROUNDS
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "accounts/accounts.h"
#include "accounts/in_flight.h"
#include "system/table.h"

#define LIMIT 1000u

struct shared {
    _Atomic uint64_t held, overshot, granted, refused;
};

static struct shared *shared;
static struct gs_accounts accounts;
static struct gs_table table;
static uint32_t card;
static int rounds;

/* What this process holds, asked while its threads go on: never more than all may, and bounds that have room for something. */
static void measure(void)
{
    struct gs_span span;
    gs_rest_begins(&accounts, card);
    gs_span_begin(&accounts, card, &span);
    bool within = gs_accounts_mine(&accounts, card) <= LIMIT;
    struct gs_bounds held = gs_span_end(&accounts, card, &span);
    gs_rest_ends(&accounts, card);
    if (!within || held.least > held.most)
        atomic_fetch_add(&shared->overshot, 1);
}

static void *play(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument * 7919u + (unsigned)getpid();
    struct gs_entry entry;
    for (int i = 0; i < rounds; i++) {
        uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % 400;
        if (i % 64 == 0)
            measure();
        gs_flight_begins(&accounts, card, GS_TAKING, bytes);
        bool reserved = gs_accounts_reserve(&accounts, card, bytes, LIMIT);
        gs_flight_ends(&accounts, card, GS_TAKING, bytes);
        if (!reserved) {
            atomic_fetch_add(&shared->refused, 1);
            continue;
        }
        /* Counted after the grant and before the return: never more than the accounts hold. */
        if (atomic_fetch_add(&shared->held, bytes) + bytes > LIMIT)
            atomic_fetch_add(&shared->overshot, 1);
        atomic_fetch_add(&shared->granted, 1);
        uint64_t key = (uint64_t)(uintptr_t)argument << 32 | (uint64_t)(i + 1);
        gs_table_put(&table, &(struct gs_entry){.key = key, .bytes = bytes});
        if (!gs_table_take(&table, key, &entry) || entry.bytes != bytes)
            atomic_fetch_add(&shared->overshot, 1);
        atomic_fetch_sub(&shared->held, bytes);
        gs_flight_begins(&accounts, card, GS_RELEASING, bytes);
        gs_accounts_return(&accounts, card, bytes);
        gs_flight_ends(&accounts, card, GS_RELEASING, bytes);
    }
    return NULL;
}

static void play_all(const char *path, int count)
{
    pthread_t threads[64];
    if (!gs_accounts_open(&accounts, path))
        exit(2);
    card = gs_accounts_card(&accounts, "GPU-stress");
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, play, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

int main(int count, char **arguments)
{
    if (count < 5)
        return 2;
    int processes = atoi(arguments[2]), threads = atoi(arguments[3]), status, failed = 0;
    rounds = atoi(arguments[4]);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < processes; i++)
        if (fork() == 0) {
            play_all(arguments[1], threads);
            exit(0);
        }
    while (wait(&status) > 0)
        failed += status != 0;
    gs_accounts_open(&accounts, arguments[1]);
    card = gs_accounts_card(&accounts, "GPU-stress");
    gs_accounts_sweep(&accounts);
    printf("granted %llu refused %llu overshot %llu left %llu failed %d\n", (unsigned long long)shared->granted,
           (unsigned long long)shared->refused, (unsigned long long)shared->overshot,
           (unsigned long long)gs_accounts_used(&accounts, card), failed);
    return 0;
}
