#include "pool.h"

#include "simd.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() ((void)0)
#endif

namespace slim {
namespace {

constexpr int64_t MAX_TASKS = (1 << 20) - 1;
constexpr auto SPIN = std::chrono::microseconds(200);

// Every thread owns a range of tasks that lie side by side, so that it reads weights as one stream; who has finished
// its own takes tasks from others. A range is epoch << 40 | next task << 20 | end. A successful compare-and-swap
// proves that the job of that epoch still has an unfinished task, so its function and context may be read after it,
// not before.
struct alignas(64) Range {
  std::atomic<uint64_t> claim{0};
};

struct Pool {
  std::vector<Range> ranges;
  alignas(64) std::atomic<uint64_t> epoch{0};  // counts jobs
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  void (*run)(void*, int64_t) = nullptr;
  void* context = nullptr;
  alignas(64) std::atomic<int64_t> finished{0};
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  std::mutex caller;

  static bool available(uint64_t c) { return ((c >> 20) & MAX_TASKS) < (c & MAX_TASKS); }

  void work(size_t self) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      std::atomic<uint64_t>& claim = ranges[(self + i) % ranges.size()].claim;
      uint64_t c = claim.load(std::memory_order_acquire);
      while (available(c)) {
        if (!claim.compare_exchange_weak(c, c + (1ull << 20), std::memory_order_acq_rel, std::memory_order_acquire))
          continue;
        run(context, (int64_t)((c >> 20) & MAX_TASKS));
        finished.fetch_add(1, std::memory_order_release);
        c = claim.load(std::memory_order_acquire);
      }
    }
  }

  void loop(size_t self) {
    uint64_t seen = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      const auto since = std::chrono::steady_clock::now();
      bool ready = false;
      while (!stop.load(std::memory_order_relaxed)) {
        for (int i = 0; i < 32 && !ready; ++i) {
          ready = epoch.load(std::memory_order_acquire) != seen;
          PAUSE();
        }
        if (ready || std::chrono::steady_clock::now() - since > SPIN) break;
      }
      if (!ready) {
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return stop.load() || epoch.load() != seen; });
        sleepers.fetch_sub(1);
      }
      seen = epoch.load(std::memory_order_acquire);
      work(self);
    }
  }

  void start(int threads) {
    ranges = std::vector<Range>((size_t)threads);
    for (int i = 1; i < threads; ++i) workers.emplace_back([this, i] { loop((size_t)i); });
  }

  // Runs all tasks; the caller is thread 0. One job at a time: `caller` is locked.
  void drive(int64_t tasks) {
    finished.store(0, std::memory_order_relaxed);
    const uint64_t job = epoch.load(std::memory_order_relaxed) + 1;
    const int64_t threads = (int64_t)ranges.size();
    for (int64_t i = 0; i < threads; ++i) {
      const uint64_t first = (uint64_t)(tasks * i / threads), end = (uint64_t)(tasks * (i + 1) / threads);
      ranges[(size_t)i].claim.store(job << 40 | first << 20 | end, std::memory_order_release);
    }
    epoch.store(job, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex); }
      wake.notify_all();
    }
    work(0);
    for (int spins = 0; finished.load(std::memory_order_acquire) < tasks; ++spins) {
      if (spins < 4096) PAUSE();
      else sched_yield();
    }
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
  }
};

std::atomic<Pool*> pool{nullptr};
std::atomic<int> wanted{1};
std::mutex starting;

Pool* started() {
  Pool* p = pool.load(std::memory_order_acquire);
  if (p != nullptr) return p;
  std::lock_guard<std::mutex> lock(starting);
  p = pool.load();
  if (p == nullptr) {
    p = new Pool;
    p->start(wanted.load());
    pool.store(p, std::memory_order_release);
    // A forked child has none of the threads: it forgets the pool and starts its own when it first needs one.
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      pool.store(nullptr);
      new (&starting) std::mutex;
    });
    (void)registered;
  }
  return p;
}

}  // namespace

int pool_threads() { return wanted.load(std::memory_order_relaxed); }

void pool_set_threads(int threads) {
  if (threads < 1) threads = 1;
  if (threads > 256) threads = 256;
  std::lock_guard<std::mutex> lock(starting);
  if (threads == wanted.load()) return;
  Pool* p = pool.exchange(nullptr);
  wanted.store(threads);
  if (p != nullptr) {
    std::lock_guard<std::mutex> busy(p->caller);
    p->end();
  }
}

void pool_run(int64_t tasks, void (*run)(void*, int64_t), void* context) {
  Pool* p = started();
  std::unique_lock<std::mutex> only(p->caller, std::try_to_lock);
  if (!only.owns_lock() || tasks > MAX_TASKS) {  // another thread drives the pool: work alone
    for (int64_t task = 0; task < tasks; ++task) run(context, task);
    return;
  }
  p->run = run;
  p->context = context;
  p->drive(tasks);
}

void* scratch(int slot, size_t bytes) {
  struct Buffer {
    void* memory = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(memory); }
  };
  static thread_local Buffer buffers[8];
  Buffer& b = buffers[slot];
  if (b.size < bytes) {
    std::free(b.memory);
    size_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    b.memory = std::aligned_alloc(4096, rounded);
    b.size = b.memory != nullptr ? rounded : 0;
  }
  return b.memory;
}

}  // namespace slim

extern "C" {
void slim_set_threads(int threads) { slim::pool_set_threads(threads); }
int slim_threads() { return slim::pool_threads(); }
const char* slim_isa() { return slim::ISA; }
}
