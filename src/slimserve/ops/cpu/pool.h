// A small persistent thread pool: workers spin for a moment, then sleep. Every thread claims the tasks of its own range
// one by one, then those of others, so a thread that the system took away costs one task only; which thread computes a
// task never changes the task's bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace slim {

int pool_threads();
void pool_set_threads(int threads);
void pool_run(int64_t tasks, void (*run)(void* context, int64_t task), void* context);

// Calls body(task) for task in [0, tasks) on all threads and returns when every call has ended.
template <class Body>
inline void parallel(int64_t tasks, const Body& body) {
  if (tasks <= 0) return;
  if (tasks == 1 || pool_threads() == 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  pool_run(tasks, [](void* context, int64_t task) { (*static_cast<const Body*>(context))(task); },
           const_cast<Body*>(&body));
}

// Thread-local scratch of at least `bytes`, 64-byte aligned, kept between calls. `slot` names independent buffers.
void* scratch(int slot, size_t bytes);

}  // namespace slim
