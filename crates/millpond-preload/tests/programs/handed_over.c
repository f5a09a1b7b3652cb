/* Files that are handed to the kernel while they are in use. One scenario each, by name. Prints nothing and returns
   0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { THREADS = 4, ROUNDS = 60 };

/* Without any hook. */
static long raw(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
	return result;
}

static int make(int flags)
{
	make_pages("f", 0);
	int fd = open("f", flags);
	CHECK(fd >= 0);
	return fd;
}

/* ---- once: opened, read and closed, `times` times ---- */

static void once(int times)
{
	char part[PAGE];
	for (int i = 0; i < times; i++) {
		int fd = open("f", O_RDONLY);
		CHECK(fd >= 0);
		while (read(fd, part, sizeof part) > 0)
			;
		CHECK(close(fd) == 0);
	}
}

/* ---- written: files that are created and written, `times` of them, beside a file that is read often ---- */

static void written(int times)
{
	char part[PAGE];
	int often = open("f", O_RDONLY);
	CHECK(often >= 0);
	for (int i = 0; i < 100; i++)
		CHECK(pread(often, part, sizeof part, 0) == sizeof part);
	memset(part, 'w', sizeof part);
	for (int i = 0; i < times; i++) {
		int fd = open("w", O_RDWR | O_CREAT | O_EXCL, 0600);
		CHECK(fd >= 0);
		for (int n = 0; n < 3; n++)
			CHECK(write(fd, part, sizeof part) == sizeof part);
		CHECK(ftruncate(fd, PAGE + 1) == 0);
		CHECK(unlink("w") == 0);
		CHECK(close(fd) == 0);
	}
	close(often);
}

/* ---- a new file that is written, read often by another descriptor, and changed by the first one ---- */

static void written_again(void)
{
	char part[2 * PAGE], back[2 * PAGE];
	int fd = open("again", O_WRONLY | O_CREAT | O_EXCL, 0600);
	CHECK(fd >= 0);
	memset(part, 0, sizeof part);
	CHECK(write(fd, part, sizeof part) == sizeof part);
	int other = open("again", O_RDONLY);
	CHECK(other >= 0);
	for (int i = 0; i < 100; i++)
		CHECK(pread(other, back, PAGE, 0) == PAGE);
	/* Within a page, whose rest a mapping still shows. */
	CHECK(ftruncate(fd, PAGE + 100) == 0);
	CHECK(pread(other, back, 200, PAGE) == 100);
	for (int i = 1; i < 300; i++) {
		memset(part, i, sizeof part);
		CHECK(pwrite(fd, part, sizeof part, 0) == sizeof part);
		CHECK(pread(other, back, sizeof back, 0) == sizeof back && !memcmp(part, back, sizeof back));
	}
	close(fd);
	close(other);
	unlink("again");
}

/* ---- each thread reads its own writes, on one descriptor ---- */

static int shared, round_number;

static void *own_pages(void *argument)
{
	int thread = (long)argument;
	char page[PAGE];
	for (int i = 0; i < 150; i++) {
		/* The same page repeatedly, and some others. */
		int own = thread + THREADS * (i % 3 ? 0 : i % 16);
		int value = round_number + thread + i;
		memset(page, value, PAGE);
		if (i % 2)
			CHECK(pwrite(shared, page, PAGE, (off_t)own * PAGE) == PAGE);
		else
			CHECK(pwrite(shared, page, 100, (off_t)own * PAGE + 700) == 100);
		for (int j = 0; j < 3; j++) {
			char found[PAGE];
			CHECK(pread(shared, found, PAGE, (off_t)own * PAGE) == PAGE);
			CHECK(is_all(found + 700, 100, value) && (i % 2 == 0 || is_all(found, PAGE, value)));
		}
	}
	return NULL;
}

static void run_threads(void *(*work)(void *), int count)
{
	pthread_t threads[THREADS];
	for (long i = 0; i < count; i++)
		CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
}

static void writers(void)
{
	shared = make(O_RDWR);
	for (round_number = 0; round_number < ROUNDS; round_number++) {
		run_threads(own_pages, THREADS);
		if (round_number % 4 == 0) {
			CHECK(close(shared) == 0);
			shared = open("f", O_RDWR);
			CHECK(shared >= 0);
		}
	}
	/* Other threads read these pages concurrently. */
	char page[PAGE], theirs[PAGE];
	int fd = raw(SYS_openat, AT_FDCWD, (long)"f", O_RDONLY, 0);
	CHECK(fd >= 0);
	for (int i = 0; i < PAGES; i++) {
		CHECK(pread(shared, page, PAGE, (off_t)i * PAGE) == PAGE);
		CHECK(raw(SYS_pread64, fd, (long)theirs, PAGE, (long)i * PAGE) == PAGE);
		CHECK(memcmp(page, theirs, PAGE) == 0);
	}
}

/* ---- one offset: each read and write there moves it once, and is not torn ---- */

enum { RECORDS = 20000 };
static unsigned char found[RECORDS * THREADS];

static void *append(void *argument)
{
	for (uint32_t i = 0; i < 1500; i++) {
		uint32_t number = i * THREADS + (long)argument, record[4] = {number, number, number, number};
		CHECK(write(shared, record, sizeof record) == sizeof record);
		char page[PAGE];
		CHECK(pread(shared, page, 64, 0) >= 16);
	}
	return NULL;
}

static void check_records(uint32_t count)
{
	int fd = open("r", O_RDONLY);
	CHECK(fd >= 0);
	memset(found, 0, sizeof found);
	uint32_t record[4];
	for (uint32_t i = 0; i < count; i++) {
		CHECK(read(fd, record, sizeof record) == sizeof record);
		CHECK(record[0] == record[1] && record[0] == record[3] && record[0] < count);
		CHECK(found[record[0]]++ == 0);
	}
	CHECK(read(fd, record, sizeof record) == 0 && close(fd) == 0);
}

/* With O_APPEND, at one offset, and at the offset that two numbers share. */
static void offsets(void)
{
	for (int i = 0; i < 3; i++) {
		shared = open("r", O_RDWR | O_CREAT | O_TRUNC | (i == 1 ? O_APPEND : 0), 0644);
		CHECK(shared >= 0);
		int other = i == 2 ? dup(shared) : -1;
		run_threads(append, THREADS);
		CHECK(lseek(shared, 0, SEEK_CUR) == 1500 * THREADS * 16);
		CHECK(close(shared) == 0);
		if (other >= 0) {
			CHECK(lseek(other, 0, SEEK_CUR) == 1500 * THREADS * 16);
			CHECK(close(other) == 0);
		}
		check_records(1500 * THREADS);
	}
}

static void *seek_and_read(void *argument)
{
	/* One thread seeks and reads. The others read at explicit positions, so only that thread moves the offset. */
	uint32_t record[4];
	for (uint32_t i = 0; i < 6000; i++) {
		uint32_t wanted = i * 37 % RECORDS;
		if (argument) {
			CHECK(pread(shared, record, sizeof record, (off_t)wanted * 16) == sizeof record);
		} else {
			CHECK(lseek(shared, (off_t)wanted * 16, SEEK_SET) == (off_t)wanted * 16);
			CHECK(read(shared, record, sizeof record) == sizeof record);
		}
		CHECK(record[0] == wanted && record[3] == wanted);
	}
	return NULL;
}

static void make_records(void)
{
	int fd = open("r", O_RDWR | O_CREAT | O_TRUNC, 0644);
	static uint32_t records[RECORDS][4];
	for (uint32_t i = 0; i < RECORDS; i++)
		records[i][0] = records[i][1] = records[i][2] = records[i][3] = i;
	CHECK(write(fd, records, sizeof records) == sizeof records && close(fd) == 0);
}

static void seeks(void)
{
	make_records();
	for (int i = 0; i < 8; i++) {
		CHECK((shared = open("r", i % 2 ? O_RDWR : O_RDONLY)) >= 0);
		run_threads(seek_and_read, THREADS);
		CHECK(close(shared) == 0);
	}
}

/* ---- a child reads a part at the shared offset ---- */

static void *read_at_offset(void *unused)
{
	uint32_t record[4];
	ssize_t n;
	while ((n = read(shared, record, sizeof record)) > 0) {
		CHECK(n == sizeof record && record[0] == record[3] && record[0] < RECORDS);
		CHECK(__atomic_fetch_add(&found[record[0]], 1, __ATOMIC_RELAXED) == 0);
	}
	CHECK(n == 0);
	return NULL;
}

static void forked(const char *self)
{
	make_records();
	for (int i = 0; i < 20; i++) {
		int ends[2], status;
		uint32_t record[4];
		memset(found, 0, sizeof found);
		CHECK((shared = open("r", O_RDONLY)) >= 0 && pipe(ends) == 0);
		pthread_t thread;
		CHECK(pthread_create(&thread, NULL, read_at_offset, NULL) == 0);
		usleep(i * 50);
		pid_t child = fork();
		if (child == 0) {
			dup2(shared, 30);
			dup2(ends[1], 31);
			if (i % 2) {
				execl(self, self, "child", NULL);
				_exit(1);
			}
			for (int j = 0; j < 100 && read(30, record, sizeof record) == sizeof record; j++)
				CHECK(write(31, record, sizeof record) == sizeof record);
			_exit(0);
		}
		CHECK(child > 0 && close(ends[1]) == 0);
		while (read(ends[0], record, sizeof record) == sizeof record)
			CHECK(__atomic_fetch_add(&found[record[0]], 1, __ATOMIC_RELAXED) == 0);
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		pthread_join(thread, NULL);
		for (int j = 0; j < RECORDS; j++)
			CHECK(found[j] == 1);
		CHECK(close(shared) == 0 && close(ends[0]) == 0);
	}
}

/* ---- another process changes the file in the middle ---- */

static void others(void)
{
	int to[2], from[2];
	make_pages("f", 0);
	CHECK(pipe(to) == 0 && pipe(from) == 0);
	pid_t child = fork();
	if (child == 0) {
		char go, page[PAGE];
		while (raw(SYS_read, to[0], (long)&go, 1, 0) == 1 && go != 'x') {
			int fd = raw(SYS_openat, AT_FDCWD, (long)"f", O_RDWR, 0);
			CHECK(fd >= 0);
			memset(page, go, PAGE);
			CHECK(raw(SYS_pwrite64, fd, (long)page, PAGE, 3 * PAGE) == PAGE);
			CHECK(raw(SYS_close, fd, 0, 0, 0) == 0 && raw(SYS_write, from[1], (long)&go, 1, 0) == 1);
		}
		_exit(0);
	}
	char page[PAGE];
	int fd = open("f", O_RDWR);
	CHECK(child > 0 && fd >= 0);
	for (int i = 0; i < 100; i++) {
		char go = 'A' + i % 20, done;
		CHECK(write(to[1], &go, 1) == 1 && read(from[0], &done, 1) == 1);
		for (int j = 0; j < 400; j++)
			CHECK(pread(fd, page, PAGE, 3 * PAGE) == PAGE && is_all(page, PAGE, go));
	}
	CHECK(write(to[1], "x", 1) == 1 && waitpid(child, NULL, 0) == child);
}

int main(int count, char **arguments)
{
	const char *name = count > 1 ? arguments[1] : "";
	int times = count > 2 ? atoi(arguments[2]) : 1;
	if (!strcmp(name, "once"))
		once(times);
	else if (!strcmp(name, "written"))
		written(times);
	else if (!strcmp(name, "written-again"))
		written_again();
	else if (!strcmp(name, "writers"))
		writers();
	else if (!strcmp(name, "offsets"))
		offsets();
	else if (!strcmp(name, "seeks"))
		seeks();
	else if (!strcmp(name, "forked"))
		forked(arguments[0]);
	else if (!strcmp(name, "others"))
		others();
	else if (!strcmp(name, "child")) {
		uint32_t record[4];
		for (int i = 0; i < 100 && read(30, record, sizeof record) == sizeof record; i++)
			CHECK(write(31, record, sizeof record) == sizeof record);
	} else
		return 2;
	return 0;
}
