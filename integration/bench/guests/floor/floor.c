// The system calls that a back end of vhost-user must make for its requests, and nothing else: for
// each ring, one thread sleeps in a read of an eventfd, moves the data of as many requests as are in
// flight between a file and shared memory, and writes another eventfd. A second thread is the guest,
// which wakes it and waits. There is no ring, no check and no protocol. Each file has that many
// rings. It prints the nanoseconds that passed, those of the first threads' processor time, and the
// number of requests of each file.
//
// usage: floor r|w random|sequential BYTES DEPTH RINGS SECONDS FILE...
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

struct ring {
	int file, kick, call;
	uint64_t random, next, places;
	char *memory;
	atomic_int ended;
	long done, used;
	pthread_t server, guest;
};

static int writes, sequential;
static long bytes, depth, length, begin;

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

static void *serve(void *ring) {
	struct ring *r = ring;
	long begun = now(CLOCK_THREAD_CPUTIME_ID);
	for (;;) {
		wait_for(r->kick);
		if (atomic_load(&r->ended))
			break;
		for (long i = 0; i < depth; i++) {
			uint64_t place = r->next++ % r->places;
			if (!sequential) {
				r->random ^= r->random << 13;
				r->random ^= r->random >> 7;
				r->random ^= r->random << 17;
				place = r->random % r->places;
			}
			char *p = r->memory + i * bytes;
			ssize_t n = writes ? pwrite(r->file, p, bytes, place * bytes)
				: pread(r->file, p, bytes, place * bytes);
			if (n != bytes)
				die("the file");
		}
		r->done += depth;
		wake(r->call);
	}
	r->used = now(CLOCK_THREAD_CPUTIME_ID) - begun;
	return NULL;
}

static void *ask(void *ring) {
	struct ring *r = ring;
	do {
		wake(r->kick);
		wait_for(r->call);
	} while (now(CLOCK_MONOTONIC) - begin < length);
	atomic_store(&r->ended, 1);
	wake(r->kick);
	return NULL;
}

static void prepare(struct ring *r, const char *path, uint64_t seed) {
	struct stat info;
	if ((r->file = open(path, O_RDWR)) < 0 || fstat(r->file, &info))
		die(path);
	if ((r->places = info.st_size / bytes) < 1)
		exit(2);
	r->random = 88172645463325252ull ^ seed;
	int shared = memfd_create("floor", 0);
	if (shared < 0 || ftruncate(shared, bytes * depth))
		die("memfd");
	r->memory = mmap(NULL, bytes * depth, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
	if (r->memory == MAP_FAILED)
		die("mmap");
	memset(r->memory, 0x5a, bytes * depth);
	r->kick = eventfd(0, 0);
	r->call = eventfd(0, 0);
	if (r->kick < 0 || r->call < 0)
		die("eventfd");
}

int main(int argc, char **argv) {
	if (argc < 8)
		return 2;
	writes = argv[1][0] == 'w';
	sequential = argv[2][0] == 's';
	bytes = atol(argv[3]);
	depth = atol(argv[4]);
	long rings = atol(argv[5]), files = argc - 7;
	length = atof(argv[6]) * 1e9;
	struct ring *all = calloc(files * rings, sizeof *all);
	if (bytes < 1 || depth < 1 || rings < 1 || !all)
		return 2;
	for (long i = 0; i < files * rings; i++)
		prepare(all + i, argv[7 + i / rings], i);
	begin = now(CLOCK_MONOTONIC);
	for (long i = 0; i < files * rings; i++)
		if (pthread_create(&all[i].server, NULL, serve, all + i) ||
			pthread_create(&all[i].guest, NULL, ask, all + i))
			die("thread");
	long used = 0;
	for (long i = 0; i < files * rings; i++) {
		pthread_join(all[i].guest, NULL);
		pthread_join(all[i].server, NULL);
		used += all[i].used;
	}
	printf("%ld %ld", now(CLOCK_MONOTONIC) - begin, used);
	for (long i = 0; i < files; i++) {
		long done = 0;
		for (long j = 0; j < rings; j++)
			done += all[i * rings + j].done;
		printf(" %ld", done);
	}
	printf("\n");
	return 0;
}
