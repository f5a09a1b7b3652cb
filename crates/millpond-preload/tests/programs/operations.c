/* operations SEED COUNT map|nomap: random operations on one file, in one thread, with a model of its bytes.

   The model is in memory; it has the file's bytes and each description's offset. The result of each call and the
   bytes that it reads have to match the model. Now and then, and at the end, the whole file has to match, also as
   another process reads it. Operations have any length from zero to some pages. Their positions are random, more
   often at page borders and around the file's end. With `map` mappings read and write the file, too. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include "check.h"

enum { REACH = 320 << 10, LEN_MAX = 5 * PAGE, NUMBERS = 3 };

static unsigned char model[REACH], buffer[REACH];
static size_t size;
/* Open descriptions of the file: fd is -1 if there is none. */
static struct number { int fd, writes, appends; off_t offset; } numbers[NUMBERS];
static uint64_t state;
static int can_punch = 1, can_zero = 1, can_allocate = 1;

static uint64_t below(uint64_t limit)
{
	/* SplitMix64. */
	uint64_t word = state += 0x9e3779b97f4a7c15;
	word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
	word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
	return (word ^ (word >> 31)) % limit;
}

static size_t min(size_t a, size_t b) { return a < b ? a : b; }

/* A place up to `limit`: half of them at the border of a page or near the end of the file. */
static size_t place(size_t limit)
{
	size_t at = below(limit + 1);
	switch (below(4)) {
	case 0: at -= at % PAGE; break;
	case 1: at = size > 8 ? size - 8 + below(17) : at; break;
	}
	return min(at, limit);
}

static size_t length(size_t at)
{
	size_t n = below(8) ? below(LEN_MAX) : PAGE * below(6);
	return min(below(16) ? n : 0, REACH - at);
}

static void fill(size_t n)
{
	uint64_t word = below(UINT64_MAX);
	for (size_t i = 0; i < n; i++)
		buffer[i] = (word >> (i % 8 * 8)) + i / 256;
}

/* The model: bytes are written, or the size is set. */
static void put(size_t at, size_t n)
{
	if (n == 0)
		return;
	memcpy(model + at, buffer, n);
	if (size < at + n)
		size = at + n;
}

static void cut(size_t to)
{
	if (to < size)
		memset(model + to, 0, size - to);
	size = to;
}

static void same(size_t at, size_t n, const char *what)
{
	for (size_t i = 0; i < n; i++)
		if (buffer[i] != model[at + i]) {
			fprintf(stderr, "%s: byte %zu of %zu is %d, not %d\n", what, at + i, size, buffer[i],
				model[at + i]);
			_exit(1);
		}
}

static size_t readable(size_t at, size_t n) { return at < size ? min(n, size - at) : 0; }

/* Vectors over the buffer: up to four parts, some of them empty. */
static int vectors(struct iovec *parts, size_t n)
{
	int count = 1 + below(4);
	unsigned char *at = buffer;
	for (int i = 0; i < count; i++) {
		size_t len = i == count - 1 ? n : below(n + 1);
		parts[i] = (struct iovec){ at, len };
		at += len;
		n -= len;
	}
	return count;
}

static void do_read(struct number *number)
{
	struct iovec parts[4];
	int by_offset = below(2), vectored = below(4) == 0;
	size_t at = by_offset ? min(number->offset, REACH) : place(REACH), n = length(at);
	memset(buffer, 0xEE, n);
	ssize_t got;
	if (vectored) {
		int count = vectors(parts, n);
		got = by_offset ? readv(number->fd, parts, count) : preadv(number->fd, parts, count, at);
	} else {
		got = by_offset ? read(number->fd, buffer, n) : pread(number->fd, buffer, n, at);
	}
	CHECK(got == (ssize_t)readable(at, n));
	same(at, got, "read");
	if (by_offset)
		number->offset += got;
}

static void do_write(struct number *number)
{
	struct iovec parts[4];
	int by_offset = number->appends || below(2), vectored = below(4) == 0;
	size_t at = number->appends ? size : by_offset ? (size_t)number->offset : place(REACH);
	if (at > REACH)
		return;
	size_t n = length(at);
	fill(n);
	ssize_t put_bytes;
	if (vectored) {
		int count = vectors(parts, n);
		put_bytes = by_offset ? writev(number->fd, parts, count) : pwritev(number->fd, parts, count, at);
	} else {
		put_bytes = by_offset ? write(number->fd, buffer, n) : pwrite(number->fd, buffer, n, at);
	}
	CHECK(put_bytes == (ssize_t)n);
	put(at, n);
	/* An empty append moves no offset. */
	if (by_offset && (n > 0 || !number->appends))
		number->offset = at + n;
}

static void do_seek(struct number *number)
{
	off_t at = place(REACH);
	switch (below(3)) {
	case 0: CHECK(lseek(number->fd, at, SEEK_SET) == at); break;
	case 1: CHECK(lseek(number->fd, at - number->offset, SEEK_CUR) == at); break;
	default: CHECK(lseek(number->fd, at - (off_t)size, SEEK_END) == at); break;
	}
	number->offset = at;
}

static void do_size(struct number *number)
{
	struct stat stat_of;
	if (number->writes && below(2)) {
		size_t to = place(REACH);
		CHECK((below(2) ? ftruncate(number->fd, to) : truncate("file", to)) == 0);
		cut(to);
	}
	CHECK((below(2) ? fstat(number->fd, &stat_of) : stat("file", &stat_of)) == 0);
	CHECK(stat_of.st_size == (off_t)size);
}

/* Returns whether the file system did it: not every file system supports it. */
static int allocate(struct number *number, int mode, int *can, size_t at, size_t n)
{
	if (!*can || n == 0)
		return 0;
	int done = fallocate(number->fd, mode, at, n);
	*can = done == 0 || errno != EOPNOTSUPP;
	CHECK(done == 0 || !*can);
	return done == 0;
}

static void do_extent(struct number *number)
{
	size_t at = place(REACH), n = length(at), end = at + n;
	switch (below(3)) {
	case 0:
		if (allocate(number, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, &can_punch, at, n) && at < size)
			memset(model + at, 0, min(end, size) - at);
		break;
	case 1:
		if (allocate(number, FALLOC_FL_ZERO_RANGE, &can_zero, at, n)) {
			memset(model + at, 0, n);
			size = size < end ? end : size;
		}
		break;
	default:
		if (allocate(number, 0, &can_allocate, at, n))
			size = size < end ? end : size;
		break;
	}
}

static void do_copy(struct number *number)
{
	off64_t from = place(REACH), to = place(REACH);
	size_t n = length(from > to ? from : to), gap = from > to ? from - to : to - from;
	/* Overlapping ranges are refused. */
	n = min(min(n, gap), readable(from, n));
	if (n == 0 || number->appends)
		return;
	memcpy(buffer, model + from, n);
	off64_t end = to;
	for (size_t left = n; left > 0; left -= end - to, to = end) {
		ssize_t done = copy_file_range(number->fd, &from, number->fd, &end, left, 0);
		CHECK(done > 0);
		memcpy(buffer, model + from - done, done);
		put(to, done);
	}
}

static void do_map(struct number *number)
{
	size_t first = place(size) / PAGE * PAGE, n = readable(first, 1 + below(LEN_MAX));
	if (n == 0)
		return;
	int writes = number->writes && below(2);
	int kind = writes || below(2) ? MAP_SHARED : MAP_PRIVATE;
	unsigned char *memory = mmap(NULL, n, writes ? PROT_READ | PROT_WRITE : PROT_READ, kind, number->fd, first);
	CHECK(memory != MAP_FAILED);
	memcpy(buffer, memory, n);
	same(first, n, "mapped");
	if (writes) {
		size_t at = below(n), len = below(n - at + 1);
		fill(len);
		memcpy(memory + at, buffer, len);
		memcpy(model + first + at, buffer, len);
		if (below(2))
			CHECK(msync(memory, n, MS_SYNC) == 0);
		/* A call reads it while it is mapped. */
		CHECK(pread(number->fd, buffer, n, first) == (ssize_t)n);
		same(first, n, "read beside the mapping");
	}
	CHECK(munmap(memory, n) == 0);
}

static void do_sync(struct number *number)
{
	CHECK((below(2) ? fsync(number->fd) : fdatasync(number->fd)) == 0);
}

static void open_number(struct number *number)
{
	if (number->fd >= 0)
		CHECK(close(number->fd) == 0);
	*number = (struct number){ .fd = -1 };
	/* The first descriptor is always open, and for writing. */
	if (number != numbers && below(3))
		return;
	number->writes = number == numbers || below(2);
	number->appends = number->writes && below(8) == 0;
	number->fd = open("file", (number->writes ? O_RDWR : O_RDONLY) | (number->appends ? O_APPEND : 0));
	CHECK(number->fd >= 0);
}

/* Reads the file by this process's calls, or by another process, which the kernel serves. */
static void look_at_all(void)
{
	CHECK(pread(numbers[0].fd, buffer, REACH, 0) == (ssize_t)size);
	same(0, size, "whole");
	if (below(4))
		return;
	FILE *other = popen("exec cat file", "r");
	CHECK(other && fread(buffer, 1, REACH, other) == size && fgetc(other) == EOF);
	CHECK(pclose(other) == 0);
	same(0, size, "by another process");
}

int main(int argc, char **argv)
{
	CHECK(argc == 4);
	state = strtoull(argv[1], NULL, 10);
	long count = atol(argv[2]);
	int maps = strcmp(argv[3], "map") == 0;
	CHECK(close(open("file", O_RDWR | O_CREAT | O_TRUNC, 0644)) == 0);
	for (int i = 0; i < NUMBERS; i++)
		numbers[i].fd = -1;
	open_number(numbers);
	for (long i = 0; i < count; i++) {
		struct number *number = &numbers[below(NUMBERS)];
		if (number->fd < 0)
			number = numbers;
		int what = below(200);
		if (what < 90)
			do_read(number);
		else if (what < 130)
			(number->writes ? do_write : do_read)(number);
		else if (what < 150)
			do_seek(number);
		else if (what < 165)
			do_size(number);
		else if (what < 175)
			(number->writes ? do_extent : do_read)(number);
		else if (what < 182)
			(number->writes ? do_copy : do_read)(number);
		else if (what < 190)
			(maps ? do_map : do_read)(number);
		else if (what < 192)
			do_sync(number);
		else if (what < 199)
			open_number(&numbers[below(NUMBERS)]);
		else if (below(10) == 0)
			look_at_all();
	}
	look_at_all();
	printf("%ld operations, %d %d %d\n", count, can_punch, can_zero, can_allocate);
	return 0;
}
