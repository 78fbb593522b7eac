/* What each process holds of each card. Records are the truth; sums follow. All writes happen under the lock. */
#include <string.h>

#include "state.h"

enum { TAKEN = 1, PARKED = 2 };

static uint64_t ghost_bytes(const struct sim_state *state, uint32_t card)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < state->ghost_high; i++)
        if (state->ghosts[i].live && state->ghosts[i].card == card)
            bytes += state->ghosts[i].bytes;
    return bytes;
}

uint64_t sim_round(uint64_t bytes)
{
    uint64_t step = sim_state()->granularity_bytes;
    return (bytes + step - 1) / step * step;
}

uint64_t sim_used_bytes(uint32_t card)
{
    const struct sim_state *state = sim_state();
    uint64_t bytes = state->cards[card].used_bytes + ghost_bytes(state, card);
    for (uint32_t child = 0; state->cards[card].mig_mode == 1 && child < state->card_count; child++)
        if (state->cards[child].parent == (int32_t)card)
            bytes += state->cards[child].used_bytes + ghost_bytes(state, child);
    return bytes;
}

uint64_t sim_usable_bytes(uint32_t card)
{
    const struct sim_card *it = &sim_state()->cards[card];
    return it->total_bytes - it->reserved_bytes;
}

uint64_t sim_free_bytes(uint32_t card)
{
    uint64_t taken = sim_used_bytes(card) + sim_state()->cards[card].idle_bytes;
    uint64_t usable = sim_usable_bytes(card);
    return taken < usable ? usable - taken : 0;
}

static void add_sums(const struct sim_record *record)
{
    struct sim_state *state = sim_state();
    state->cards[record->card].used_bytes += record->bytes;
    if (record->process == SIM_NOBODY)
        return;
    state->processes[record->process].used_bytes[record->card][record->kind] += record->bytes;
    state->processes[record->process].context_count[record->card] += record->kind == SIM_CONTEXT;
}

static void subtract_sums(const struct sim_record *record)
{
    struct sim_state *state = sim_state();
    state->cards[record->card].used_bytes -= record->bytes;
    if (record->process == SIM_NOBODY)
        return;
    state->processes[record->process].used_bytes[record->card][record->kind] -= record->bytes;
    state->processes[record->process].context_count[record->card] -= record->kind == SIM_CONTEXT;
}

static uint32_t take_record(void)
{
    struct sim_state *state = sim_state();
    uint32_t index = state->record_free;
    if (index) {
        state->record_free = state->records[index].next_free;
        return index;
    }
    return state->record_high < SIM_RECORDS ? state->record_high++ : 0;
}

static uint32_t write_record(const struct sim_record *fields)
{
    uint32_t index = take_record();
    if (!index)
        return 0;
    struct sim_record *record = &sim_state()->records[index];
    uint32_t generation = record->generation + 1;
    memcpy((char *)record + sizeof record->live, (const char *)fields + sizeof fields->live,
           sizeof *record - sizeof record->live);
    record->generation = generation;
    atomic_store_explicit(&record->live, 1, memory_order_release);
    add_sums(record);
    return index;
}

/* What a process could still get. Managed memory is the system's, for the accounts by cgroup. */
static uint64_t room_of(uint32_t process, uint32_t card, enum sim_kind kind)
{
    uint64_t room = sim_free_bytes(card);
    if (kind == SIM_MANAGED || process >= SIM_PROCESSES)
        return room;
    uint64_t left = sim_allowance(sim_state()->processes[process].cgroups, card).left;
    return left < room ? left : room;
}

/* Room for the bytes, if need be after taking back what dead processes held. */
static bool has_room(uint32_t process, uint32_t card, enum sim_kind kind, uint64_t bytes)
{
    if (bytes <= room_of(process, card, kind))
        return true;
    sim_reap();
    return bytes <= room_of(process, card, kind);
}

uint32_t sim_charge(uint32_t card, enum sim_kind kind, uint64_t bytes, uint64_t address)
{
    uint32_t self = sim_self();
    uint32_t index = 0;
    if (self == SIM_PROCESSES)
        return 0;
    sim_lock();
    if (has_room(self, card, kind, bytes))
        index = write_record(&(struct sim_record){
            .card = (uint16_t)card, .kind = (uint16_t)kind, .process = self, .bytes = bytes, .address = address});
    sim_unlock();
    return index;
}

uint64_t sim_charge_up_to(uint32_t card, enum sim_kind kind, uint64_t bytes, uint64_t address, uint32_t *record)
{
    uint32_t self = sim_self();
    *record = 0;
    if (self == SIM_PROCESSES)
        return 0;
    sim_lock();
    if (!has_room(self, card, kind, bytes))
        bytes = room_of(self, card, kind) / sim_state()->granularity_bytes * sim_state()->granularity_bytes;
    *record = write_record(&(struct sim_record){
        .card = (uint16_t)card, .kind = (uint16_t)kind, .process = self, .bytes = bytes, .address = address});
    sim_unlock();
    return *record ? bytes : 0;
}

/* An importer that keeps this record alive, 0 if none: a process before a descriptor. */
static uint32_t heir_of(uint32_t target)
{
    const struct sim_state *state = sim_state();
    uint32_t kept = 0;
    for (uint32_t index = 1; index < state->record_high; index++) {
        const struct sim_record *record = &state->records[index];
        if (!record->live || record->kind != SIM_IMPORT || record->target != target)
            continue;
        if (record->process != SIM_NOBODY)
            return index;
        kept = index;
    }
    return kept;
}

static void erase(uint32_t index)
{
    struct sim_state *state = sim_state();
    struct sim_record *record = &state->records[index];
    if (record->live == TAKEN)
        subtract_sums(record);
    atomic_store_explicit(&record->live, 0, memory_order_release);
    record->next_free = state->record_free;
    state->record_free = index;
}

/* The importer's record becomes the memory itself; other importers follow it. */
static void pass_on(uint32_t index, uint32_t heir)
{
    struct sim_state *state = sim_state();
    struct sim_record *from = &state->records[index];
    struct sim_record *to = &state->records[heir];
    subtract_sums(to);
    to->kind = from->kind;
    to->bytes = from->bytes;
    to->shared = 1;
    to->target = 0;
    add_sums(to);
    for (uint32_t i = 1; i < state->record_high; i++)
        if (state->records[i].live && state->records[i].kind == SIM_IMPORT && state->records[i].target == index)
            state->records[i].target = heir;
}

void sim_release_locked(uint32_t index)
{
    const struct sim_record *record = &sim_state()->records[index];
    uint32_t heir = record->shared ? heir_of(index) : 0;
    if (heir)
        pass_on(index, heir);
    erase(index);
}

void sim_release(uint32_t index)
{
    if (!index)
        return;
    sim_lock();
    sim_release_locked(index);
    sim_unlock();
}

/* Of an import it is the memory behind it that is imported again. */
static uint32_t import_for(uint32_t process, uint32_t target, uint64_t address)
{
    if (sim_state()->records[target].kind == SIM_IMPORT)
        target = sim_state()->records[target].target;
    struct sim_record *record = &sim_state()->records[target];
    if (!record->live)
        return 0;
    record->shared = 1;
    return write_record(&(struct sim_record){
        .card = record->card, .kind = SIM_IMPORT, .process = process, .address = address, .target = target});
}

uint32_t sim_import(uint32_t target, uint32_t generation)
{
    uint32_t self = sim_self();
    uint32_t index = 0;
    if (self == SIM_PROCESSES || target == 0 || target >= SIM_RECORDS)
        return 0;
    sim_lock();
    if (sim_state()->records[target].live && sim_state()->records[target].generation == generation)
        index = import_for(self, target, 0);
    sim_unlock();
    return index;
}

struct sim_kept sim_keep(uint32_t target, uint64_t number)
{
    struct sim_kept kept = {0};
    sim_lock();
    kept.record = import_for(SIM_NOBODY, target, number);
    kept.generation = sim_state()->records[kept.record].generation;
    sim_state()->exports += kept.record != 0;
    sim_unlock();
    return kept;
}

bool sim_grow(uint32_t index, uint64_t bytes)
{
    sim_lock();
    struct sim_record *record = &sim_state()->records[index];
    bool fits = has_room(record->process, record->card, (enum sim_kind)record->kind, bytes);
    if (fits) {
        subtract_sums(record);
        record->bytes += bytes;
        add_sums(record);
    }
    sim_unlock();
    return fits;
}

bool sim_is_imported(uint32_t index)
{
    const struct sim_record *record = &sim_state()->records[index];
    return record->kind == SIM_IMPORT || (record->shared && heir_of(index));
}

bool sim_park(uint32_t process)
{
    struct sim_state *state = sim_state();
    for (uint32_t index = 1; index < state->record_high; index++) {
        struct sim_record *record = &state->records[index];
        if (record->live != TAKEN || record->process != process)
            continue;
        subtract_sums(record);
        record->live = PARKED;
    }
    return true;
}

bool sim_unpark(uint32_t process)
{
    struct sim_state *state = sim_state();
    uint64_t needed[SIM_CARDS] = {0};
    for (uint32_t index = 1; index < state->record_high; index++)
        if (state->records[index].live == PARKED && state->records[index].process == process)
            needed[state->records[index].card] += state->records[index].bytes;
    for (uint32_t card = 0; card < state->card_count; card++)
        if (needed[card] && !has_room(process, card, SIM_PLAIN, needed[card]))
            return false;
    for (uint32_t index = 1; index < state->record_high; index++) {
        struct sim_record *record = &state->records[index];
        if (record->live != PARKED || record->process != process)
            continue;
        record->live = TAKEN;
        add_sums(record);
    }
    return true;
}

static void clear_sums(struct sim_state *state)
{
    for (uint32_t card = 0; card < state->card_count; card++)
        state->cards[card].used_bytes = 0;
    for (uint32_t slot = 0; slot < state->process_high; slot++) {
        if (!state->processes[slot].live)
            continue;
        memset(state->processes[slot].used_bytes, 0, sizeof state->processes[slot].used_bytes);
        memset(state->processes[slot].context_count, 0, sizeof state->processes[slot].context_count);
    }
}

void sim_recover(void)
{
    struct sim_state *state = sim_state();
    clear_sums(state);
    state->record_free = 0;
    for (uint32_t index = 1; index < state->record_high; index++) {
        struct sim_record *record = &state->records[index];
        if (record->live == TAKEN)
            add_sums(record);
        if (!record->live) {
            record->next_free = state->record_free;
            state->record_free = index;
        }
    }
}
