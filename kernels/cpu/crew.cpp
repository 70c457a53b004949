// Threads that help a caller with its items.
//
// The caller publishes a round of items and takes from it like every helper; it waits for items that are taken, never
// for a thread. So a helper that has no core delays nothing unless it lost it within an item, and none has to be there:
// not at the beginning, and not where the system gives no threads at all. All wait for some microseconds awake, since a
// step has hundreds of rounds, and then asleep, since somebody else may need the core.
#include "crew.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

namespace pf {

struct Crew {
    // Of the round: written by the caller where no item is left, read by those who have taken one.
    Body body;
    const void* context;
    int32_t count;
    int32_t grain;

    alignas(64) int32_t left;        // items that nobody has taken yet
    alignas(64) int32_t unfinished;  // items that are not done
    alignas(64) int32_t round;       // counts up
    int32_t num_idle;                // helpers asleep
    int32_t is_caller_asleep;
    int64_t woken_ns;                // when the caller last woke helpers

    pthread_mutex_t mutex;  // held to fall asleep and to wake
    pthread_cond_t published;
    pthread_cond_t finished;

    int32_t size;
    int32_t num_ranks;  // given out
    bool is_hired;
    Crew* next;
};

namespace {

constexpr int kSpins = 300;             // some microseconds: longer than threads that all run are apart
constexpr int64_t kWakeNs = 200'000;  // waking costs both sides some microseconds, more than a short round is worth

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

int32_t load(const int32_t* number) { return __atomic_load_n(number, __ATOMIC_SEQ_CST); }
void store(int32_t* number, int32_t value) { __atomic_store_n(number, value, __ATOMIC_SEQ_CST); }

bool changes_soon(const int32_t* number, int32_t value, bool until_zero) {
    for (int spins = 0; spins < kSpins; spins++) {
        int32_t now = load(number);
        if (until_zero ? now == 0 : now != value) return true;
        pause();
    }
    return false;
}

// Called by the caller alone, while there are items.
void wake(Crew& crew) {
    if (!load(&crew.num_idle)) return;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = now.tv_sec * (int64_t)1'000'000'000 + now.tv_nsec;
    if (now_ns - crew.woken_ns < kWakeNs) return;
    crew.woken_ns = now_ns;
    pthread_mutex_lock(&crew.mutex);
    pthread_cond_broadcast(&crew.published);
    pthread_mutex_unlock(&crew.mutex);
}

// Takes items and does them until none is left: of the round that is on, whichever it is by then.
void work(Crew& crew, int32_t rank) {
    int32_t left = load(&crew.left);
    while (left > 0) {
        // Large shares first, since neighbours follow each other in memory, and small ones at the end.
        int32_t share = left / (4 * crew.size), grain = __atomic_load_n(&crew.grain, __ATOMIC_RELAXED);
        if (share < grain) share = grain;
        if (share > left) share = left;
        if (!__atomic_compare_exchange_n(&crew.left, &left, left - share, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        // The round can't end now before these are done.
        int32_t begin = crew.count - left;
        crew.body(crew.context, begin, begin + share, rank);
        if (__atomic_sub_fetch(&crew.unfinished, share, __ATOMIC_SEQ_CST) == 0 && load(&crew.is_caller_asleep)) {
            pthread_mutex_lock(&crew.mutex);
            pthread_cond_signal(&crew.finished);
            pthread_mutex_unlock(&crew.mutex);
        }
        left = load(&crew.left);
        if (rank == 0 && left > 0) wake(crew);
    }
}

void* help(void* argument) {
    Crew& crew = *(Crew*)argument;
    int32_t rank = __atomic_add_fetch(&crew.num_ranks, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        int32_t round = load(&crew.round);
        work(crew, rank);
        if (changes_soon(&crew.round, round, false)) continue;
        pthread_mutex_lock(&crew.mutex);
        __atomic_add_fetch(&crew.num_idle, 1, __ATOMIC_SEQ_CST);
        while (load(&crew.round) == round) pthread_cond_wait(&crew.published, &crew.mutex);
        __atomic_sub_fetch(&crew.num_idle, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_unlock(&crew.mutex);
    }
}

pthread_mutex_t all_mutex = PTHREAD_MUTEX_INITIALIZER;
Crew* all;

Crew* new_crew(int32_t size) {
    Crew* crew = (Crew*)aligned_alloc(alignof(Crew), sizeof(Crew));
    if (!crew) return nullptr;
    memset((void*)crew, 0, sizeof(Crew));
    crew->size = size;
    pthread_mutex_init(&crew->mutex, nullptr);
    pthread_cond_init(&crew->published, nullptr);
    pthread_cond_init(&crew->finished, nullptr);
    for (int32_t i = 1; i < size; i++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, help, crew)) break;  // fewer will do
        pthread_detach(thread);
    }
    return crew;
}

}  // namespace

void run_on(Crew* crew, int32_t count, int32_t grain, Body body, const void* context) {
    crew->body = body;
    crew->context = context;
    crew->count = count;
    __atomic_store_n(&crew->grain, grain, __ATOMIC_RELAXED);
    store(&crew->unfinished, count);
    store(&crew->left, count);
    __atomic_add_fetch(&crew->round, 1, __ATOMIC_SEQ_CST);
    wake(*crew);
    work(*crew, 0);
    if (changes_soon(&crew->unfinished, 0, true)) return;
    pthread_mutex_lock(&crew->mutex);
    store(&crew->is_caller_asleep, 1);
    while (load(&crew->unfinished)) pthread_cond_wait(&crew->finished, &crew->mutex);
    store(&crew->is_caller_asleep, 0);
    pthread_mutex_unlock(&crew->mutex);
}

Hired::Hired(int32_t size) : crew_(nullptr), size_(size) {
    if (size < 2) return;
    pthread_mutex_lock(&all_mutex);
    crew_ = all;
    while (crew_ && (crew_->is_hired || crew_->size != size)) crew_ = crew_->next;
    if (!crew_) {
        crew_ = new_crew(size);
        if (!crew_) abort();
        crew_->next = all;
        all = crew_;
    }
    crew_->is_hired = true;
    pthread_mutex_unlock(&all_mutex);
}

Hired::~Hired() {
    if (!crew_) return;
    pthread_mutex_lock(&all_mutex);
    crew_->is_hired = false;
    pthread_mutex_unlock(&all_mutex);
}

}  // namespace pf
