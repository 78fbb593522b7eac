/* Whatever stands in the region, and whatever is written over it meanwhile, the accounts neither crash nor grant a process
 * more than the limit by its own account. For libFuzzer, or, built with STANDALONE, a loop over random scripts:
 * fuzz_region ROUNDS SEED, or over the files it is given.
 *
 * An input is a script: one byte that says what to do, and what that needs.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "accounts/accounts.h"

#define LIMIT (UINT64_C(1) << 34)
#define MOST_STEPS 200

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static char path[64];
static struct gs_accounts accounts;
static uint64_t held[GPUSLICE_CARDS], exported[GPUSLICE_CARDS];

struct script {
    const unsigned char *at, *end;
};

static uint64_t take(struct script *script, size_t bytes)
{
    uint64_t value = 0;
    size_t left = (size_t)(script->end - script->at);
    bytes = bytes < left ? bytes : left;
    memcpy(&value, script->at, bytes);
    script->at += bytes;
    return value;
}

static void require(bool condition)
{
    if (!condition)
        abort();
}

static void write_at(uint64_t offset, const void *content, size_t bytes)
{
    unsigned char *region = (unsigned char *)gs_accounts_at(&accounts).region;
    offset %= sizeof(struct gpuslice_region);
    bytes = bytes < sizeof(struct gpuslice_region) - offset ? bytes : sizeof(struct gpuslice_region) - offset;
    memcpy(region + offset, content, bytes);
}

/* Words, which a tenant would write, and where they count: the heads of the cards and of the first slots. */
static void write_word(struct script *script)
{
    uint64_t where = take(script, 2), value = take(script, 8);
    size_t head = offsetof(struct gpuslice_region, slots);
    write_at(where % 2 ? head + where / 2 * 8 % (4 * sizeof(struct gpuslice_slot)) : where / 2 * 8 % head, &value, 8);
}

static void fill(struct script *script)
{
    static unsigned char content[sizeof(struct gpuslice_region)];
    uint64_t seed = take(script, 4), from = take(script, 3), kind = take(script, 1);
    for (size_t i = 0; i < sizeof content; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
        content[i] = kind % 3 == 0 ? 0 : kind % 3 == 1 ? 0xff : (unsigned char)(seed >> 56);
    }
    write_at(from, content, sizeof content);
}

/* Behind our back as long as nobody touches it: the look comes before anything else. */
static void cut(struct script *script)
{
    require(truncate(path, (off_t)(take(script, 3) % sizeof(struct gpuslice_region))) == 0);
    atomic_store(&accounts.looked_ns, 0);
    gs_accounts_look(&accounts);
}

static void replace(void)
{
    if (accounts.moves >= 32) /* each leaves a mapping behind */
        return;
    unlink(path);
    atomic_store(&accounts.looked_ns, 0);
    gs_accounts_look(&accounts);
}

static void reserve(uint32_t card, uint64_t bytes)
{
    uint64_t own = card < GPUSLICE_CARDS ? held[card] : 0;
    if (!gs_accounts_reserve(&accounts, card, bytes, LIMIT))
        return;
    require(card < GPUSLICE_CARDS && own + bytes <= LIMIT);
    held[card] += bytes;
}

static void give_back(uint32_t card, uint64_t bytes)
{
    if (card >= GPUSLICE_CARDS || !gs_accounts_at(&accounts).slot)
        return;
    bytes = held[card] ? bytes % (held[card] + 1) : 0;
    gs_accounts_return(&accounts, card, bytes);
    held[card] -= bytes;
}

static void share(uint32_t card, uint64_t bytes)
{
    if (card >= GPUSLICE_CARDS || exported[card] + bytes > held[card])
        return;
    gs_accounts_exported(&accounts, card, bytes);
    exported[card] += bytes;
}

static void unshare(uint32_t card)
{
    if (card >= GPUSLICE_CARDS || !exported[card])
        return;
    gs_accounts_return_exported(&accounts, card, exported[card]);
    held[card] -= exported[card];
    exported[card] = 0;
}

static void ask(uint32_t card)
{
    uint64_t used = gs_accounts_used(&accounts, card);
    require(card >= GPUSLICE_CARDS ? used == 0 : used >= held[card]);
}

static void step(struct script *script)
{
    uint64_t what = take(script, 1);
    uint32_t card = (uint32_t)take(script, 1) % (GPUSLICE_CARDS + 1);
    char uuid[16];
    switch (what % 16) {
    case 0 ... 2: reserve(card, take(script, 5)); break;
    case 3: give_back(card, take(script, 5)); break;
    case 4: ask(card); break;
    case 5 ... 7: write_word(script); break;
    case 8: fill(script); break;
    case 9: cut(script); break;
    case 10: replace(); break;
    case 11: share(card, take(script, 4)); break;
    case 12: unshare(card); break;
    case 13: gs_accounts_imported(&accounts, card, take(script, 1) % 2 ? 1 : -1); break;
    case 14: gs_accounts_sweep(&accounts); break;
    default: snprintf(uuid, sizeof uuid, "GPU-%u", card); require(gs_accounts_card(&accounts, uuid) <= GPUSLICE_CARDS);
    }
}

static void start(void)
{
    snprintf(path, sizeof path, "/tmp/gpuslice-fuzz-%d", (int)getpid());
    unlink(path);
    require(gs_accounts_open(&accounts, path));
    memset(held, 0, sizeof held);
    memset(exported, 0, sizeof exported);
}

/* Every mapping that was ours, so that a million inputs leave none behind. */
static void end(void)
{
    struct gpuslice_region *last = NULL;
    for (uint32_t i = 0; i < GS_ATTACHMENTS; i++)
        if (accounts.attachments[i].region && accounts.attachments[i].region != last) {
            last = accounts.attachments[i].region;
            for (uint32_t later = i + 1; later < GS_ATTACHMENTS; later++)
                if (accounts.attachments[later].region == last)
                    accounts.attachments[later].region = NULL;
            gs_unmap(last, sizeof *last);
        }
    unlink(path);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    struct script script = {data, data + size};
    start();
    for (int steps = 0; script.at < script.end && steps < MOST_STEPS; steps++) {
        step(&script);
        for (uint32_t card = 0; card < GPUSLICE_CARDS; card++)
            require(gs_accounts_mine(&accounts, card) == held[card]);
    }
    end();
    return 0;
}

#ifdef STANDALONE
static void run_file(const char *name)
{
    unsigned char data[4096];
    FILE *file = fopen(name, "rb");
    require(file != NULL);
    size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
}

static void run_random(int rounds, unsigned seed)
{
    unsigned char data[512];
    srand(seed);
    for (int round = 0; round < rounds; round++) {
        size_t size = (size_t)rand() % sizeof data;
        for (size_t i = 0; i < size; i++)
            data[i] = (unsigned char)rand();
        LLVMFuzzerTestOneInput(data, size);
    }
}

int main(int count, char **arguments)
{
    int rounds = count == 3 ? atoi(arguments[1]) : 0;
    if (rounds)
        run_random(rounds, (unsigned)atoi(arguments[2]));
    for (int i = 1; !rounds && i < count; i++)
        run_file(arguments[i]);
    return 0;
}
#endif
