/* sendfile, copy_file_range and splice. One scenario each, by name. Prints nothing and returns 0 if all results are
   the kernel's. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"

enum { BIG = 3000001 };
static unsigned char big[BIG], back[BIG];

static int make(const char *name, size_t size)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0);
	for (size_t i = 0; i < size; i++)
		big[i] = i * 2654435761u >> 13;
	CHECK(write(fd, big, size) == (ssize_t)size);
	CHECK(lseek(fd, 0, SEEK_SET) == 0);
	return fd;
}

static off_t at(int fd)
{
	return lseek(fd, 0, SEEK_CUR);
}

static void check_copy(int fd, off_t to, off_t from, size_t size)
{
	CHECK(pread(fd, back, size, to) == (ssize_t)size);
	CHECK(memcmp(back, big + from, size) == 0);
}

/* ---- one call moves all bytes, and the right offsets ---- */

static void whole(void)
{
	for (int round = 0; round < 2; round++) {
		size_t len = round ? BIG + 12345 : 2ul * 0x7ffff000;
		int a = make("a", BIG), b = open("b", O_RDWR | O_CREAT | O_TRUNC, 0644);
		CHECK(sendfile(b, a, NULL, len) == BIG);
		CHECK(at(a) == BIG && at(b) == BIG);
		check_copy(b, 0, 0, BIG);
		CHECK(sendfile(b, a, NULL, len) == 0);

		off_t from = 1000;
		CHECK(ftruncate(b, 0) == 0 && lseek(b, 7, SEEK_SET) == 7 && lseek(a, 5, SEEK_SET) == 5);
		CHECK(sendfile(b, a, &from, 2000000) == 2000000);
		CHECK(from == 2001000 && at(a) == 5 && at(b) == 2000007);
		check_copy(b, 7, 1000, 2000000);
		CHECK(sendfile(b, a, &from, len) == BIG - 2001000 && from == BIG && at(b) == 7 + BIG - 1000);
		check_copy(b, 7, 1000, BIG - 1000);

		/* All four combinations of explicit and implicit offsets. */
		for (int kind = 0; kind < 4; kind++) {
			off_t in = 300, out = 400;
			off_t *explicit_in = kind & 1 ? &in : NULL, *explicit_out = kind & 2 ? &out : NULL;
			CHECK(ftruncate(b, 0) == 0 && lseek(b, 20, SEEK_SET) == 20 && lseek(a, 10, SEEK_SET) == 10);
			off_t first = kind & 1 ? 300 : 10, start = kind & 2 ? 400 : 20;
			ssize_t moved = copy_file_range(a, explicit_in, b, explicit_out, len, 0);
			CHECK(moved == BIG - first);
			CHECK(in == (kind & 1 ? BIG : 300) && at(a) == (kind & 1 ? 10 : BIG));
			CHECK(out == (kind & 2 ? 400 + moved : 400) && at(b) == (kind & 2 ? 20 : 20 + moved));
			check_copy(b, start, first, moved);
			CHECK(copy_file_range(a, explicit_in, b, explicit_out, len, 0) == 0);
		}
		close(a);
		close(b);
	}
}

/* ---- a copy does not move the source's offset past the bytes that it could write ---- */

static void no_room(void)
{
	signal(SIGXFSZ, SIG_IGN);
	int a = make("a", BIG), b = open("b", O_RDWR | O_CREAT | O_TRUNC, 0644);
	struct rlimit limit = {1234567, RLIM_INFINITY};
	CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
	off_t in = 0, moved = 0;
	ssize_t n;
	/* The kernel may return a short count before it is out of room; the next call returns the error. */
	while ((n = copy_file_range(a, &in, b, NULL, BIG, 0)) > 0) {
		moved += n;
		CHECK(in == moved && at(b) == moved && at(a) == 0);
	}
	CHECK(n == -1 && errno == EFBIG && moved == 1234567 && in == moved && at(b) == moved);
	check_copy(b, 0, 0, moved);
	CHECK(ftruncate(b, 0) == 0 && lseek(b, 0, SEEK_SET) == 0);
	moved = 0;
	while ((n = sendfile(b, a, NULL, BIG)) > 0) {
		moved += n;
		CHECK(at(b) == moved && at(a) == moved);
	}
	CHECK(n == -1 && errno == EFBIG && moved == 1234567 && at(a) == moved);
	check_copy(b, 0, 0, moved);
	limit.rlim_cur = RLIM_INFINITY;
	setrlimit(RLIMIT_FSIZE, &limit);
	close(a);
	close(b);

	/* Errors that the kernel checks before it copies. */
	a = make("a", BIG);
	b = open("b", O_RDONLY);
	CHECK(sendfile(b, a, NULL, 10) == -1 && errno == EBADF && at(a) == 0);
	CHECK(copy_file_range(a, NULL, b, NULL, 10, 0) == -1 && errno == EBADF && at(a) == 0);
	close(b);
	b = open("b", O_WRONLY | O_CREAT, 0644);
	off_t before = -1;
	CHECK(copy_file_range(a, &before, b, NULL, 10, 0) == -1 && errno == EOVERFLOW);
	CHECK(sendfile(b, a, &before, 10) == -1 && errno == EINVAL);
	off_t after = INT64_MAX - 5;
	CHECK(copy_file_range(a, &after, b, NULL, 10, 0) == 0);
	CHECK(copy_file_range(a, NULL, b, NULL, 10, 1) == -1 && errno == EINVAL);
	CHECK(sendfile(b, a, NULL, 0) == 0 && copy_file_range(a, NULL, b, NULL, 0, 0) == 0);
	/* Within one file: overlapping ranges are refused. */
	off_t in2 = 0, out2 = 100;
	CHECK(copy_file_range(a, &in2, a, &out2, 1000, 0) == -1 && errno == EINVAL);
	close(a);
	close(b);
}

/* ---- to blocking and nonblocking sockets and pipes ---- */

static void drain(int fd, off_t from, size_t size)
{
	size_t got = 0;
	while (got < size) {
		ssize_t n = read(fd, back + got, size - got);
		CHECK(n > 0);
		got += n;
	}
	CHECK(memcmp(back, big + from, size) == 0);
}

/* Reads all bytes that a nonblocking socket holds. */
static size_t take(int fd, size_t from)
{
	size_t got = 0;
	for (ssize_t n; (n = read(fd, back, sizeof back)) > 0; got += n)
		CHECK(memcmp(back, big + from + got, n) == 0);
	return got;
}

static void streams(void)
{
	int pair[2], ends[2];
	int a = make("a", BIG);
	/* The call waits until the peer has read all bytes. */
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	pid_t child = fork();
	if (child == 0) {
		close(pair[0]);
		drain(pair[1], 10, BIG - 10);
		drain(pair[1], 1000, 2000000);
		_exit(0);
	}
	close(pair[1]);
	close(a);
	a = open("a", O_RDWR);
	CHECK(lseek(a, 10, SEEK_SET) == 10);
	CHECK(sendfile(pair[0], a, NULL, BIG) == BIG - 10 && at(a) == BIG);
	off_t from = 1000;
	CHECK(sendfile(pair[0], a, &from, 2000000) == 2000000 && from == 2001000 && at(a) == BIG);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	close(pair[0]);
	close(a);

	/* The call moves as many bytes as there is room for, and returns their count. */
	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
	for (int explicit = 0; explicit < 2; explicit++) {
		a = open("a", O_RDWR);
		from = 0;
		size_t moved = 0, taken = 0;
		while (moved < BIG) {
			ssize_t n = sendfile(pair[0], a, explicit ? &from : NULL, BIG);
			if (n < 0) {
				CHECK(errno == EAGAIN && moved > taken);
				taken += take(pair[1], taken);
				CHECK(taken == moved);
				continue;
			}
			CHECK(n > 0);
			moved += n;
			CHECK(explicit ? from == (off_t)moved && at(a) == 0 : at(a) == (off_t)moved);
		}
		taken += take(pair[1], taken);
		CHECK(taken == BIG);
		close(a);
	}

	/* A pipe receives bytes up to its capacity. */
	CHECK(pipe2(ends, O_NONBLOCK) == 0);
	CHECK(fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) >= 1 << 20);
	a = open("a", O_RDWR);
	CHECK(pread(a, back, 100, 0) == 100);
	size_t moved = 0;
	while (moved < BIG) {
		from = moved;
		ssize_t n = splice(a, moved % 2 ? &from : NULL, ends[1], NULL, BIG, 0);
		if (n < 0) {
			CHECK(errno == EAGAIN);
			continue;
		}
		CHECK(n > 0);
		if (moved % 2)
			CHECK(from == (off_t)moved + n && lseek(a, from, SEEK_SET) == from);
		CHECK(at(a) == (off_t)moved + n);
		drain(ends[0], moved, n);
		moved += n;
	}
	CHECK(splice(a, NULL, ends[1], NULL, BIG, 0) == 0);
	/* Then from the pipe into a file. */
	int b = open("b", O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(splice(ends[0], NULL, b, NULL, 100, 0) == -1 && errno == EAGAIN);
	CHECK(write(ends[1], big, 500000) == 500000);
	CHECK(splice(ends[0], NULL, b, NULL, BIG, 0) == 500000 && at(b) == 500000);
	check_copy(b, 0, 0, 500000);
	close(a);
	close(b);
}

/* ---- another process opens the destination during the copy ---- */

enum { SIZE = 2 << 20, ROUNDS = 60 };

/* A process that opens the given path repeatedly. */
static pid_t start_opener(const char *path, int flags, int *stop)
{
	int ends[2];
	CHECK(pipe2(ends, O_NONBLOCK) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		char byte;
		close(ends[1]);
		while (read(ends[0], &byte, 1) != 0) {
			close(open(path, flags));
			usleep(rand() % 2000);
		}
		_exit(0);
	}
	close(ends[0]);
	*stop = ends[1];
	return child;
}

static void opened_meanwhile(void)
{
	int status, stop;
	close(make("a", SIZE));
	for (int side = 0; side < 2; side++) {
		pid_t child = start_opener(side ? "a" : "b", side ? O_RDWR : O_RDONLY, &stop);
		for (int round = 0; round < ROUNDS; round++) {
			int a = open("a", O_RDONLY), b = open("b", O_RDWR | O_CREAT | O_TRUNC, 0644);
			CHECK(a >= 0 && b >= 0);
			off_t in = 0, out = 0, moved = 0;
			size_t part = round % 2 ? SIZE : 600000;
			while (moved < SIZE) {
				ssize_t n;
				switch (round % 3) {
				case 0: n = copy_file_range(a, NULL, b, NULL, part, 0); break;
				case 1: n = copy_file_range(a, &in, b, &out, part, 0); break;
				default: n = sendfile(b, a, NULL, part);
				}
				CHECK(n > 0);
				moved += n;
				CHECK(round % 3 == 1 ? in == moved && out == moved && at(a) == 0 && at(b) == 0
					: at(a) == moved && at(b) == moved);
			}
			CHECK(moved == SIZE);
			check_copy(b, 0, 0, SIZE);
			close(a);
			close(b);
		}
		close(stop);
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	}
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = {
		{"whole", whole}, {"no_room", no_room}, {"streams", streams},
		{"opened_meanwhile", opened_meanwhile},
	};
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
		if (count > 1 && strcmp(arguments[1], all[i].name) == 0) {
			all[i].run();
			return 0;
		}
	return 2;
}
