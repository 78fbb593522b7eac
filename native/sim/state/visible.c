/* Which cards a process sees. NVIDIA_VISIBLE_DEVICES stands for what a container runtime mounts: with it set the
 * process counts as a container, sees only those cards, numbered from 0 in the machine's order. CUDA_VISIBLE_DEVICES
 * then chooses and orders among them, for CUDA alone. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "state.h"

struct name {
    const char *text;
    size_t length;
};

static bool next_name(const char **rest, struct name *name)
{
    const char *from = *rest;
    if (!from)
        return false;
    while (isspace((unsigned char)*from))
        from++;
    const char *comma = strchr(from, ',');
    size_t length = comma ? (size_t)(comma - from) : strlen(from);
    *rest = comma ? comma + 1 : NULL;
    while (length && isspace((unsigned char)from[length - 1]))
        length--;
    *name = (struct name){from, length};
    return true;
}

static bool is(struct name name, const char *text)
{
    return strlen(text) == name.length && strncasecmp(name.text, text, name.length) == 0;
}

/* The number a name spells, -1 if it is none. */
static long number_of(struct name name)
{
    long value = 0;
    for (size_t i = 0; i < name.length; i++) {
        if (!isdigit((unsigned char)name.text[i]) || value > 100000)
            return -1;
        value = value * 10 + (name.text[i] - '0');
    }
    return name.length ? value : -1;
}

static bool uuid_starts_with(const struct sim_card *card, struct name name)
{
    return name.length > 4 && strncasecmp(card->uuid, name.text, name.length) == 0;
}

/* The n-th whole card. */
static long whole_card(const struct sim_state *state, long wanted)
{
    long seen = 0;
    for (uint32_t card = 0; card < state->card_count; card++)
        if (state->cards[card].parent < 0 && seen++ == wanted)
            return (long)card;
    return -1;
}

/* "2:1" is the second MIG device of the third card. */
static long mig_by_numbers(const struct sim_state *state, struct name name)
{
    const char *colon = memchr(name.text, ':', name.length);
    if (!colon)
        return -1;
    long parent = whole_card(state, number_of((struct name){name.text, (size_t)(colon - name.text)}));
    long index = number_of((struct name){colon + 1, name.length - (size_t)(colon + 1 - name.text)});
    for (uint32_t card = 0; parent >= 0 && card < state->card_count; card++)
        if (state->cards[card].parent == parent && (long)state->cards[card].mig_index == index)
            return (long)card;
    return -1;
}

static long card_named(const struct sim_state *state, struct name name)
{
    long number = number_of(name);
    if (number >= 0)
        return whole_card(state, number);
    for (uint32_t card = 0; card < state->card_count; card++)
        if (uuid_starts_with(&state->cards[card], name))
            return (long)card;
    return mig_by_numbers(state, name);
}

static void mark_all(const struct sim_state *state, bool *chosen)
{
    for (uint32_t card = 0; card < state->card_count; card++)
        chosen[card] = true;
}

static void mark_named(const struct sim_state *state, const char *list, bool *chosen)
{
    struct name name;
    while (next_name(&list, &name)) {
        long card = card_named(state, name);
        if (is(name, "all"))
            mark_all(state, chosen);
        else if (card >= 0)
            chosen[card] = true;
    }
}

void sim_view_of_machine(struct sim_view *view)
{
    const struct sim_state *state = sim_state();
    const char *list = getenv("NVIDIA_VISIBLE_DEVICES");
    bool chosen[SIM_CARDS] = {false};
    *view = (struct sim_view){.contained = list != NULL};
    if (!list)
        mark_all(state, chosen);
    else
        mark_named(state, list, chosen);
    for (uint32_t card = 0; card < state->card_count; card++)
        if (chosen[card])
            view->cards[view->count++] = card;
}

bool sim_hides_processes(void)
{
    const char *host = getenv("GPUSLICE_SIM_HOST_PID");
    return getenv("NVIDIA_VISIBLE_DEVICES") != NULL && !(host && strcmp(host, "1") == 0);
}

/* ------------------------------------------------------------------------------------- what CUDA sees */

static uint64_t speed(const struct sim_card *card)
{
    return (uint64_t)card->multiprocessor_count * card->cores_per_multiprocessor * card->max_sm_clock_mhz;
}

/* Without CUDA_DEVICE_ORDER=PCI_BUS_ID the fastest cards come first. */
static void order_by_speed(const struct sim_state *state, struct sim_view *view)
{
    const char *order = getenv("CUDA_DEVICE_ORDER");
    if (order && strcmp(order, "PCI_BUS_ID") == 0)
        return;
    for (uint32_t i = 1; i < view->count; i++)
        for (uint32_t j = i; j > 0; j--) {
            uint32_t card = view->cards[j];
            if (speed(&state->cards[card]) <= speed(&state->cards[view->cards[j - 1]]))
                break;
            view->cards[j] = view->cards[j - 1];
            view->cards[j - 1] = card;
        }
}

static bool has_mig_devices(const struct sim_state *state, uint32_t parent)
{
    return state->cards[parent].parent < 0 && state->cards[parent].mig_mode == 1;
}

static bool contains(const struct sim_view *view, long card)
{
    for (uint32_t i = 0; i < view->count; i++)
        if ((long)view->cards[i] == card)
            return true;
    return false;
}

/* CUDA enumerates whole cards; with MIG on, only the first MIG device that this process may see. */
static void keep_what_cuda_enumerates(const struct sim_state *state, struct sim_view *view)
{
    struct sim_view kept = {.contained = view->contained};
    for (uint32_t i = 0; i < view->count; i++) {
        uint32_t card = view->cards[i];
        if (state->cards[card].parent < 0 && !has_mig_devices(state, card))
            kept.cards[kept.count++] = card;
    }
    for (uint32_t i = 0; kept.count == 0 && i < view->count; i++)
        if (state->cards[view->cards[i]].parent >= 0)
            kept.cards[kept.count++] = view->cards[i];
    *view = kept;
}

static long visible_card_named(const struct sim_state *state, const struct sim_view *all, const struct sim_view *enumerated,
                               struct name name)
{
    long number = number_of(name);
    if (number >= 0)
        return number < (long)enumerated->count ? (long)enumerated->cards[number] : -1;
    for (uint32_t i = 0; i < all->count; i++)
        if (uuid_starts_with(&state->cards[all->cards[i]], name))
            return has_mig_devices(state, all->cards[i]) ? -1 : (long)all->cards[i];
    return -1;
}

/* The list ends at the first name that is no visible card; a card named twice makes the list empty. */
static void choose(const struct sim_state *state, const char *list, const struct sim_view *all,
                   const struct sim_view *enumerated, struct sim_view *view)
{
    struct name name;
    while (next_name(&list, &name)) {
        long card = visible_card_named(state, all, enumerated, name);
        if (card < 0)
            return;
        if (contains(view, card)) {
            view->count = 0;
            return;
        }
        view->cards[view->count++] = (uint32_t)card;
    }
}

void sim_view_of_cuda(struct sim_view *view)
{
    const struct sim_state *state = sim_state();
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    struct sim_view all;
    sim_view_of_machine(&all);
    struct sim_view enumerated = all;
    keep_what_cuda_enumerates(state, &enumerated);
    order_by_speed(state, &enumerated);
    *view = (struct sim_view){.contained = all.contained};
    if (list)
        choose(state, list, &all, &enumerated, view);
    else
        *view = enumerated;
}
