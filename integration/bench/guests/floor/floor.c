// The system calls that a back end of vhost-user must make for its requests, and nothing else: one
// thread sleeps in a read of an eventfd, moves the data of as many requests as are in flight
// between a file and shared memory, and writes another eventfd. A second thread is the guest, which
// wakes it and waits. There is no ring, no check and no protocol. It prints the number of requests,
// the nanoseconds that passed, and those of the first thread's processor time.
//
// usage: floor FILE r|w random|sequential BYTES DEPTH SECONDS
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int file, kick, call, writes, sequential;
static long bytes, depth, places;
static char *memory;
static atomic_int ended;
static long done, used;

static void die(const char *what) {
	perror(what);
	exit(1);
}

static long now(clockid_t clock) {
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void wait_for(int fd) {
	uint64_t n;
	if (read(fd, &n, sizeof n) != sizeof n)
		die("read of an eventfd");
}

static void wake(int fd) {
	uint64_t n = 1;
	if (write(fd, &n, sizeof n) != sizeof n)
		die("write of an eventfd");
}

static void *serve(void *unused) {
	(void)unused;
	uint64_t random = 88172645463325252ull, next = 0;
	long begin = now(CLOCK_THREAD_CPUTIME_ID);
	for (;;) {
		wait_for(kick);
		if (atomic_load(&ended))
			break;
		for (long i = 0; i < depth; i++) {
			uint64_t place = next++ % places;
			if (!sequential) {
				random ^= random << 13;
				random ^= random >> 7;
				random ^= random << 17;
				place = random % places;
			}
			char *p = memory + i * bytes;
			ssize_t n = writes ? pwrite(file, p, bytes, place * bytes)
				: pread(file, p, bytes, place * bytes);
			if (n != bytes)
				die("the file");
		}
		done += depth;
		wake(call);
	}
	used = now(CLOCK_THREAD_CPUTIME_ID) - begin;
	return NULL;
}

int main(int argc, char **argv) {
	if (argc != 7)
		return 2;
	writes = argv[2][0] == 'w';
	sequential = argv[3][0] == 's';
	bytes = atol(argv[4]);
	depth = atol(argv[5]);
	long length = atof(argv[6]) * 1e9;
	struct stat info;
	if ((file = open(argv[1], O_RDWR)) < 0 || fstat(file, &info))
		die(argv[1]);
	if (bytes < 1 || depth < 1 || (places = info.st_size / bytes) < 1)
		return 2;
	int shared = memfd_create("floor", 0);
	if (shared < 0 || ftruncate(shared, bytes * depth))
		die("memfd");
	memory = mmap(NULL, bytes * depth, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	memset(memory, 0x5a, bytes * depth);
	kick = eventfd(0, 0);
	call = eventfd(0, 0);
	pthread_t server;
	if (kick < 0 || call < 0 || pthread_create(&server, NULL, serve, NULL))
		die("thread");
	long begin = now(CLOCK_MONOTONIC), took;
	do {
		wake(kick);
		wait_for(call);
		took = now(CLOCK_MONOTONIC) - begin;
	} while (took < length);
	atomic_store(&ended, 1);
	wake(kick);
	pthread_join(server, NULL);
	printf("%ld %ld %ld\n", done, took, used);
	return 0;
}
