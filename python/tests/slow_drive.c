// A slow drive for a program that is started with this library in LD_PRELOAD: in each direction, one transfer at a time moves
// SLOW_DRIVE_RATE bytes per second. While the file SLOW_DRIVE_HOLD exists, reads do not return.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*read_function)(int, void*, size_t, off_t);
typedef ssize_t (*write_function)(int, const void*, size_t, off_t);

static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER, writing = PTHREAD_MUTEX_INITIALIZER;

static void sleep_ns(long long ns) {
  struct timespec left = {ns / 1000000000, ns % 1000000000};
  while (nanosleep(&left, &left) != 0) {
  }
}

static void move(pthread_mutex_t* direction, ssize_t bytes) {
  const char* rate = getenv("SLOW_DRIVE_RATE");
  if (rate == NULL || bytes <= 0) return;
  pthread_mutex_lock(direction);
  sleep_ns((long long)bytes * 1000000000 / atoll(rate));
  pthread_mutex_unlock(direction);
}

static ssize_t slow_read(const char* name, int file, void* data, size_t bytes, off_t offset) {
  const char* hold = getenv("SLOW_DRIVE_HOLD");
  while (hold != NULL && access(hold, F_OK) == 0) sleep_ns(5000000);
  const ssize_t moved = ((read_function)dlsym(RTLD_NEXT, name))(file, data, bytes, offset);
  move(&reading, moved);
  return moved;
}

static ssize_t slow_write(const char* name, int file, const void* data, size_t bytes, off_t offset) {
  const ssize_t moved = ((write_function)dlsym(RTLD_NEXT, name))(file, data, bytes, offset);
  move(&writing, moved);
  return moved;
}

ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
  return slow_read("pread", file, data, bytes, offset);
}
ssize_t pread64(int file, void* data, size_t bytes, off64_t offset) {
  return slow_read("pread64", file, data, bytes, offset);
}
ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
  return slow_write("pwrite", file, data, bytes, offset);
}
ssize_t pwrite64(int file, const void* data, size_t bytes, off64_t offset) {
  return slow_write("pwrite64", file, data, bytes, offset);
}
