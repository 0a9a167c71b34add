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

// claim = epoch << 40 | next task << 20 | number of tasks. A successful compare-and-swap proves that the job of that
// epoch still has an unfinished task, so its function and context may be read after it, not before.
struct Pool {
  std::atomic<uint64_t> claim{0};
  std::atomic<int64_t> finished{0};
  void (*run)(void*, int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  std::mutex caller;

  static bool available(uint64_t c) { return ((c >> 20) & MAX_TASKS) < (c & MAX_TASKS); }

  bool work() {
    uint64_t c = claim.load(std::memory_order_acquire);
    bool any = false;
    while (available(c)) {
      if (!claim.compare_exchange_weak(c, c + (1ull << 20), std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      run(context, (int64_t)((c >> 20) & MAX_TASKS));
      finished.fetch_add(1, std::memory_order_release);
      any = true;
      c = claim.load(std::memory_order_acquire);
    }
    return any;
  }

  void loop() {
    while (!stop.load(std::memory_order_relaxed)) {
      auto since = std::chrono::steady_clock::now();
      while (!stop.load(std::memory_order_relaxed)) {
        if (work()) since = std::chrono::steady_clock::now();
        bool ready = false;
        for (int i = 0; i < 32 && !ready; ++i) {
          PAUSE();
          ready = available(claim.load(std::memory_order_acquire));
        }
        if (!ready && std::chrono::steady_clock::now() - since > SPIN) break;
      }
      std::unique_lock<std::mutex> lock(mutex);
      sleepers.fetch_add(1);
      wake.wait(lock, [&] { return stop.load() || available(claim.load()); });
      sleepers.fetch_sub(1);
    }
  }

  void start(int threads) {
    for (int i = 1; i < threads; ++i) workers.emplace_back([this] { loop(); });
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
  p->finished.store(0, std::memory_order_relaxed);
  const uint64_t epoch = (p->claim.load(std::memory_order_relaxed) >> 40) + 1;
  p->claim.store(epoch << 40 | (uint64_t)tasks, std::memory_order_seq_cst);
  if (p->sleepers.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> lock(p->mutex); }
    p->wake.notify_all();
  }
  p->work();
  for (int spins = 0; p->finished.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < 4096) PAUSE();
    else sched_yield();
  }
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
