/*
 * The floor that a target is measured against: a bare loop of the system calls that every target must make for the same
 * bytes. It receives what has arrived, does one pread or pwrite for each command, and sends all answers at once. It
 * checks nothing, and knows only the iSCSI that the load generator needs: a login without authentication, TEST UNIT
 * READY, READ(16), and WRITE(16) with immediate data (RFC 7143 11.3, 11.7). It is not a target.
 *
 * floor PORT FILE... serves FILEs as LUN 1 and up on 127.0.0.1.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HEADER = 48, SEGMENT = 256 << 10, WINDOW = 128, IN = 512 << 10, OUT = 1 << 20 };

static int luns[256], count;

struct connection {
	int fd;
	uint32_t stat_sn;
	size_t begin, end; /* what of in has not been handled yet */
	size_t queued;	   /* of out */
	unsigned char *in, *out;
};

static void fatal(const char *what)
{
	perror(what);
	exit(1);
}

static uint32_t get32(const unsigned char *p)
{
	uint32_t v;
	memcpy(&v, p, 4);
	return be32toh(v);
}

static void put32(unsigned char *p, uint32_t v)
{
	v = htobe32(v);
	memcpy(p, &v, 4);
}

static uint64_t get64(const unsigned char *p)
{
	uint64_t v;
	memcpy(&v, p, 8);
	return be64toh(v);
}

static uint32_t length_of(const unsigned char *h)
{
	return h[5] << 16 | h[6] << 8 | h[7];
}

static int flush(struct connection *c)
{
	size_t sent = 0;
	while (sent < c->queued) {
		ssize_t n = send(c->fd, c->out + sent, c->queued - sent, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -1;
		sent += n;
	}
	c->queued = 0;
	return 0;
}

/* answer queues a header that leaves the command window open. Data may follow it. */
static unsigned char *answer(struct connection *c, const unsigned char *h, int opcode, int flags, uint32_t length)
{
	unsigned char *a = c->out + c->queued;
	memset(a, 0, HEADER);
	a[0] = opcode;
	a[1] = flags;
	a[5] = length >> 16;
	a[6] = length >> 8;
	a[7] = length;
	memcpy(a + 16, h + 16, 4);
	put32(a + 24, c->stat_sn++);
	uint32_t cmd_sn = get32(h + 24) + !(h[0] & 0x40);
	put32(a + 28, cmd_sn);
	put32(a + 32, cmd_sn + WINDOW - 1);
	c->queued += HEADER + ((length + 3) & ~3u);
	return a;
}

static int login(struct connection *c, const unsigned char *h)
{
	static const char keys[] = "TargetPortalGroupTag=1\0HeaderDigest=None\0DataDigest=None\0MaxRecvDataSegmentLength=262144\0"
				   "InitialR2T=No\0ImmediateData=Yes\0MaxBurstLength=262144\0FirstBurstLength=262144\0"
				   "MaxOutstandingR2T=1\0MaxConnections=1\0ErrorRecoveryLevel=0\0DefaultTime2Wait=2\0"
				   "DefaultTime2Retain=0\0DataPDUInOrder=Yes\0DataSequenceInOrder=Yes";
	unsigned char *a = answer(c, h, 0x23, 0x87, sizeof keys);
	memcpy(a + 8, h + 8, 6); /* ISID */
	a[15] = 1;		 /* TSIH */
	memset(a + HEADER, 0, (sizeof keys + 3) & ~3u);
	memcpy(a + HEADER, keys, sizeof keys);
	return flush(c);
}

static int command(struct connection *c, const unsigned char *h, const unsigned char *data)
{
	unsigned lun = h[8] << 8 | h[9];
	uint64_t off = get64(h + 34) * 512;
	uint32_t n = get32(h + 42) * 512;
	if (lun < 1 || lun > (unsigned)count || n > SEGMENT)
		return -1;
	switch (h[32]) {
	case 0x00:
		answer(c, h, 0x21, 0x80, 0);
		return 0;
	case 0x88:
		if (c->queued + HEADER + n > OUT && flush(c))
			return -1;
		if (pread(luns[lun - 1], c->out + c->queued + HEADER, n, off) != (ssize_t)n)
			return -1;
		answer(c, h, 0x25, 0x81, n); /* F and S: the status travels with the data */
		return 0;
	case 0x8a:
		if (length_of(h) != n || pwrite(luns[lun - 1], data, n, off) != (ssize_t)n)
			return -1;
		answer(c, h, 0x21, 0x80, 0);
		return 0;
	}
	return -1;
}

/* receive reads until at least that much has arrived. */
static int receive(struct connection *c, size_t least)
{
	if (c->begin > 0) {
		memmove(c->in, c->in + c->begin, c->end - c->begin);
		c->end -= c->begin;
		c->begin = 0;
	}
	while (c->end < least) {
		/* Wait for the rest of a large segment in one call. */
		int all = least - c->end > 16 << 10;
		ssize_t n = recv(c->fd, c->in + c->end, all ? least - c->end : IN - c->end, all ? MSG_WAITALL : 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -1;
		c->end += n;
	}
	return 0;
}

static void *serve(void *argument)
{
	struct connection c = {.fd = (int)(intptr_t)argument, .stat_sn = 1, .in = malloc(IN), .out = malloc(OUT + HEADER + SEGMENT)};
	if (!c.in || !c.out)
		fatal("malloc");
	for (;;) {
		size_t have = c.end - c.begin, want = HEADER;
		unsigned char *h = c.in + c.begin;
		if (have >= HEADER)
			want += (length_of(h) + 3) & ~3u;
		if (want > HEADER + SEGMENT)
			break;
		if (have < want) {
			if (flush(&c) || receive(&c, want))
				break;
			continue;
		}
		c.begin += want;
		int opcode = h[0] & 0x3f;
		if (opcode == 0x03 ? login(&c, h) : opcode == 0x01 ? command(&c, h, h + HEADER) : -1)
			break;
	}
	close(c.fd);
	free(c.in);
	free(c.out);
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc < 3 || argc - 2 > (int)(sizeof luns / sizeof *luns)) {
		fprintf(stderr, "usage: floor PORT FILE...\n");
		return 2;
	}
	for (int i = 2; i < argc; i++)
		if ((luns[count++] = open(argv[i], O_RDWR | O_CLOEXEC)) < 0)
			fatal(argv[i]);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64))
		fatal("listen");
	for (;;) {
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		pthread_t thread;
		if (fd < 0)
			continue;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); /* as ours does within a host */
		if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd))
			fatal("pthread_create");
		pthread_detach(thread);
	}
}
