/* Writes to files, makes holes and zeros in them, allocates space for them and cuts them; two threads, two files
   each. Reports each call on standard output before and after it, like the program `writer`. Each thread ends after
   the number of steps in the second argument; 0: never. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HELLO, WRITE, TRUNCATE, PUNCH, ZERO, ALLOCATE, KEEP_SIZE, SYNC, REOPEN };
enum { FILES = 2, LEN_MAX = 40000, REACH = 1 << 20 };
enum { CALLED, RETURNED, REFUSED };

/* A record of the report; shorter than a pipe's atomic write. */
struct record {
	uint32_t kind, state, thread, file;
	uint64_t offset, len, sequence;
};

struct thread {
	uint32_t number;
	uint64_t random, sequence, steps;
	struct { int fd; uint64_t size; char name[16]; } files[FILES];
};

static uint64_t next(struct thread *t, uint64_t below)
{
	t->random ^= t->random << 13;
	t->random ^= t->random >> 7;
	t->random ^= t->random << 17;
	return t->random % below;
}

static void say(struct record *r)
{
	if (write(1, r, sizeof *r) != sizeof *r)
		_exit(3);
}

static void check(int ok, const char *what)
{
	if (!ok) {
		fprintf(stderr, "extents: %s: %s\n", what, strerror(errno));
		_exit(4);
	}
}

static int allocate(int fd, int mode, struct record *r)
{
	int done = fallocate(fd, mode, r->offset, r->len);
	if (done < 0 && errno == EOPNOTSUPP)
		return REFUSED;
	check(done == 0, "fallocate");
	return RETURNED;
}

static void step(struct thread *t, uint32_t number)
{
	static __thread unsigned char buf[LEN_MAX];
	int fd = t->files[number].fd;
	uint64_t *size = &t->files[number].size, dice = next(t, 100);
	struct record r = {.thread = t->number, .file = number};
	r.kind = dice < 60 ? WRITE : dice < 66 ? TRUNCATE : dice < 76 ? PUNCH : dice < 84 ? ZERO
		: dice < 90 ? ALLOCATE : dice < 94 ? KEEP_SIZE : dice < 97 ? SYNC : REOPEN;
	r.offset = next(t, 3) ? next(t, *size + 1) : next(t, REACH);
	r.len = 1 + next(t, next(t, 2) ? 300 : LEN_MAX);
	if (next(t, 2)) {
		r.offset &= ~4095ull;
		r.len = (r.len + 4095) / 4096 * 4096;
		if (r.len > LEN_MAX)
			r.len = 4096;
	}
	r.sequence = ++t->sequence;
	say(&r);
	r.state = RETURNED;
	switch (r.kind) {
	case WRITE:
		for (uint64_t i = 0; i < r.len; i++) {
			uint64_t x = r.sequence * 2654435761u + i * 40503u + t->number * 77u;
			buf[i] = (unsigned char)(x >> 13 ^ x);
		}
		check(pwrite(fd, buf, r.len, r.offset) == (ssize_t)r.len, "pwrite");
		break;
	case TRUNCATE:
		check(ftruncate(fd, r.offset) == 0, "ftruncate");
		*size = r.offset;
		break;
	case PUNCH:
		r.state = allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, &r);
		break;
	case ZERO:
		r.state = allocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, &r);
		break;
	case ALLOCATE:
		if (next(t, 2))
			r.state = allocate(fd, 0, &r);
		else
			check(posix_fallocate(fd, r.offset, r.len) == 0, "posix_fallocate");
		break;
	case KEEP_SIZE:
		r.state = allocate(fd, FALLOC_FL_KEEP_SIZE, &r);
		break;
	case SYNC:
		check((next(t, 2) ? fsync : fdatasync)(fd) == 0, "fsync");
		break;
	case REOPEN:
		check(close(fd) == 0, "close");
		t->files[number].fd = open(t->files[number].name, O_RDWR);
		check(t->files[number].fd >= 0, "open");
		break;
	}
	if ((r.kind == WRITE || (r.kind == ALLOCATE && r.state == RETURNED)) && r.offset + r.len > *size)
		*size = r.offset + r.len;
	say(&r);
}

static void *work(void *argument)
{
	struct thread *t = argument;
	for (int i = 0; i < FILES; i++) {
		snprintf(t->files[i].name, sizeof t->files[i].name, "t%u-%d", t->number, i);
		t->files[i].fd = open(t->files[i].name, O_RDWR | O_CREAT | O_EXCL, 0644);
		check(t->files[i].fd >= 0, "open");
	}
	for (uint64_t done = 0; t->steps == 0 || done < t->steps; done++)
		step(t, next(t, FILES));
	return NULL;
}

int main(int argc, char **argv)
{
	static struct thread threads[2];
	struct record hello = {.kind = HELLO, .state = RETURNED, .sequence = getpid()};
	say(&hello);
	for (uint32_t i = 0; i < 2; i++) {
		threads[i].number = i;
		threads[i].steps = strtoull(argv[2], NULL, 10);
		threads[i].random = strtoull(argv[1], NULL, 10) * 2 + i + 88172645463325252u;
	}
	pthread_t second;
	check(pthread_create(&second, NULL, work, &threads[1]) == 0, "pthread_create");
	work(&threads[0]);
	check(pthread_join(second, NULL) == 0, "pthread_join");
	return 0;
}
