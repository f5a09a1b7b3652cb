/* Writes to files without end, two threads to three files each, and reports each call on standard output before and
   after it. The process that kills it can compute from that the bytes that must be in the files: see the test
   `kills` of the command line. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HELLO, CREATE, WRITE, TRUNCATE, RENAME, UNLINK, REOPEN, SYNC };
enum { FILES = 3, LEN_MAX = 40000, SIZE_MAX_BYTES = 3 << 20 };

/* A record of the report; shorter than a pipe's atomic write. */
struct record {
	uint32_t kind, returned, thread, file;
	uint64_t offset, len, sequence;
	char name[24];
};

struct file {
	int fd, is_appending, is_unlinked;
	uint64_t size;
	char name[24];
};

struct thread {
	uint32_t number;
	uint64_t random, sequence;
	struct file files[FILES];
	unsigned names;
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
		fprintf(stderr, "writer: %s: %s\n", what, strerror(errno));
		_exit(4);
	}
}

static void open_file(struct file *f, int flags)
{
	f->fd = open(f->name, flags | (f->is_appending ? O_WRONLY | O_APPEND : O_RDWR), 0644);
	check(f->fd >= 0, "open");
}

static void step(struct thread *t, uint32_t number)
{
	static __thread unsigned char buf[LEN_MAX];
	struct file *f = &t->files[number];
	struct record r = {.thread = t->number, .file = number};
	uint64_t dice = next(t, 100);
	if (f->fd < 0) {
		r.kind = CREATE;
		snprintf(r.name, sizeof r.name, "t%u-%u-%u", t->number, number, t->names++);
	} else if (f->is_unlinked && dice < 20) {
		/* No process can see the file any more. */
		close(f->fd);
		f->fd = -1;
		return;
	} else if (dice < 82) {
		r.kind = WRITE;
		r.len = 1 + next(t, next(t, 2) ? 300 : LEN_MAX);
		r.sequence = ++t->sequence;
		if (f->is_appending || next(t, 3) == 0)
			r.offset = f->size;
		else if (next(t, 20) == 0)
			r.offset = f->size + next(t, 30000);
		else
			r.offset = f->size ? next(t, f->size) : 0;
	} else if (dice < 87 || f->size > SIZE_MAX_BYTES) {
		r.kind = TRUNCATE;
		r.len = next(t, f->size + 10000);
	} else if (dice < 91 && !f->is_unlinked) {
		r.kind = RENAME;
		snprintf(r.name, sizeof r.name, "t%u-%u-%u", t->number, number, t->names++);
	} else if (dice < 93 && !f->is_unlinked) {
		r.kind = UNLINK;
	} else if (dice < 97 && !f->is_unlinked) {
		r.kind = REOPEN;
	} else {
		r.kind = SYNC;
	}
	say(&r);
	switch (r.kind) {
	case CREATE:
		memcpy(f->name, r.name, sizeof f->name);
		f->size = f->is_unlinked = 0;
		open_file(f, O_CREAT | O_EXCL);
		break;
	case WRITE:
		for (uint64_t i = 0; i < r.len; i++) {
			uint64_t x = r.sequence * 2654435761u + i * 40503u + t->number * 77u;
			buf[i] = (unsigned char)(x >> 13 ^ x);
		}
		if (f->is_appending)
			check(write(f->fd, buf, r.len) == (ssize_t)r.len, "write");
		else
			check(pwrite(f->fd, buf, r.len, r.offset) == (ssize_t)r.len, "pwrite");
		if (r.offset + r.len > f->size)
			f->size = r.offset + r.len;
		break;
	case TRUNCATE:
		check(ftruncate(f->fd, r.len) == 0, "ftruncate");
		f->size = r.len;
		break;
	case RENAME:
		check(rename(f->name, r.name) == 0, "rename");
		memcpy(f->name, r.name, sizeof f->name);
		break;
	case UNLINK:
		check(unlink(f->name) == 0, "unlink");
		f->is_unlinked = 1;
		break;
	case REOPEN:
		check(close(f->fd) == 0, "close");
		open_file(f, 0);
		break;
	case SYNC:
		check((next(t, 2) ? fsync : fdatasync)(f->fd) == 0, "fsync");
		break;
	}
	r.returned = 1;
	say(&r);
}

static void *work(void *argument)
{
	struct thread *t = argument;
	for (int i = 0; i < FILES; i++)
		t->files[i] = (struct file){.fd = -1, .is_appending = i == 2};
	for (;;)
		step(t, next(t, FILES));
}

int main(int argc, char **argv)
{
	static struct thread threads[2];
	struct record hello = {.kind = HELLO, .returned = 1, .sequence = getpid()};
	say(&hello);
	for (uint32_t i = 0; i < 2; i++) {
		threads[i].number = i;
		threads[i].random = strtoull(argv[1], NULL, 10) * 2 + i + 88172645463325252u;
	}
	pthread_t second;
	check(pthread_create(&second, NULL, work, &threads[1]) == 0, "pthread_create");
	work(&threads[0]);
}
