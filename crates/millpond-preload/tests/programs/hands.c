/* Served files whose description is used by several descriptors, threads or processes: reads must return the written
 * bytes, by each way to write them, and locks must be held until they are released. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "check.h"

static int fd;
static char page[PAGE];
static volatile int stage;
static unsigned delay;

static int make(const char *path, int pages)
{
	int new = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(new >= 0);
	memset(page, 'a', PAGE);
	for (int i = 0; i < pages; i++)
		CHECK(write(new, page, PAGE) == PAGE);
	return new;
}

/* Reads two pages many times. */
static void use(int number)
{
	for (int i = 0; i < 600; i++)
		CHECK(pread(number, page, PAGE, i % 2 * PAGE) == PAGE);
}

static void beside(void *(*work)(void *), void (*meanwhile)(void))
{
	pthread_t thread;
	stage = 0;
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	meanwhile();
	CHECK(pthread_join(thread, NULL) == 0);
}

/* ---- a write continues by a number that was closed, while another descriptor uses the file ---- */

enum { LONG = 64 << 20 };
static char *bytes;

static void *write_long(void *unused)
{
	stage = 1;
	/* The close may come first, on a busy machine. */
	CHECK(pwrite(fd, bytes, LONG, 0) == LONG || (errno == EBADF && pwrite(fd, bytes, LONG, 0) == LONG));
	stage = 2;
	return unused;
}

static void read_its_end(void)
{
	while (stage == 0)
		;
	usleep(1000);
	int other = dup(fd);
	close(fd);
	fd = other;
	for (int i = 0; stage != 2; i++)
		CHECK(pread(other, page, PAGE, LONG - PAGE - i % 4 * PAGE) == PAGE);
}

static void closed(void)
{
	fd = make("closed", 1);
	bytes = malloc(LONG);
	for (char value = 'b'; value <= 'd'; value++) {
		memset(bytes, value, LONG);
		int number = dup(fd);
		if (value > 'b')
			beside(write_long, read_its_end);
		else
			CHECK(pwrite(fd, bytes, LONG, 0) == LONG);
		close(number);
		for (int i = 0; i < 4; i++)
			CHECK(pread(fd, page, PAGE, LONG - PAGE - i * PAGE) == PAGE && is_all(page, PAGE, value));
	}
	close(fd);
}

/* ---- a file outside the served directory is renamed into it ---- */

static void renamed(const char *elsewhere)
{
	char byte = 0;
	int first = make(elsewhere, 16), second = dup(first);
	use(first);
	CHECK(rename(elsewhere, "renamed") == 0 || errno == EXDEV);
	use(second);
	CHECK(pwrite(first, "Z", 1, 0) == 1 && pread(second, &byte, 1, 0) == 1 && byte == 'Z');
	CHECK(lseek(first, 0, SEEK_SET) == 0 && read(second, page, 10) == 10 && lseek(first, 0, SEEK_CUR) == 10);
}

/* ---- a lock that a child holds, too ---- */

static void forked(void)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
	int ends[2], database = make("database", 16), status;
	char byte;
	CHECK(fcntl(database, F_SETLK, &lock) == 0);
	use(database);
	int locked = open("locked", O_RDWR | O_CREAT, 0644);
	CHECK(flock(locked, LOCK_EX) == 0 && pipe(ends) == 0);
	pid_t child = fork();
	if (child == 0) {
		close(ends[1]);
		_exit(read(ends[0], &byte, 1) != 0);
	}
	close(ends[0]);
	close(locked);
	int other = open("locked", O_RDWR);
	CHECK(flock(other, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
	close(ends[1]);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(flock(other, LOCK_EX) == 0);
}

/* ---- flags of calls, and of the description ---- */

static void use_it(void) { stage = 1, use(fd); }

static void await(void)
{
	while (stage == 0)
		;
	for (volatile unsigned i = 0; i < delay; i++)
		;
}

static void *append_by_flag(void *unused)
{
	struct iovec one = {"Z", 1};
	await();
	for (int i = 0; i < 6; i++)
		CHECK(pwritev2(fd, &one, 1, 0, RWF_APPEND) == 1);
	return unused;
}

static void *set_append(void *unused)
{
	await();
	CHECK(fcntl(fd, F_SETFL, O_APPEND) == 0);
	return unused;
}

static void changed(void *(*work)(void *), int appended, int tries)
{
	struct stat st;
	char byte = 0;
	srand(1);
	for (int i = 0; i < tries; i++) {
		fd = make("changed", 2);
		delay = (unsigned)rand() % 60000;
		beside(work, use_it);
		if (appended == 1)
			CHECK(lseek(fd, 0, SEEK_SET) == 0 && write(fd, "Z", 1) == 1);
		CHECK(fstat(fd, &st) == 0 && st.st_size == 2 * PAGE + appended);
		CHECK(pread(fd, &byte, 1, 0) == 1 && byte == 'a');
		close(fd);
	}
}

/* ---- a file that is only read takes no memory, and shows the writes of other processes ---- */

enum { MAPPED_PAGES = 1024 };

static void check_page(long at, char version)
{
	long half[2] = {0};
	CHECK(pread(fd, page, PAGE, at * PAGE) == PAGE);
	memcpy(half, page, sizeof half[0]);
	memcpy(half + 1, page + PAGE - sizeof half[1], sizeof half[1]);
	CHECK(half[0] == at * 256 + version && half[1] == half[0]);
}

static void write_pages(int number, char version)
{
	for (long at = 0; at < MAPPED_PAGES; at++) {
		long word = at * 256 + version;
		memset(page, version, PAGE);
		memcpy(page, &word, sizeof word);
		memcpy(page + PAGE - sizeof word, &word, sizeof word);
		CHECK(pwrite(number, page, PAGE, at * PAGE) == PAGE);
	}
}

static void read_pages(int rounds, char version)
{
	for (long i = 0; i < (long)rounds * MAPPED_PAGES; i++)
		check_page(i * 7919 % MAPPED_PAGES, version);
	char end[100];
	CHECK(pread(fd, end, sizeof end, MAPPED_PAGES * PAGE - 10) == 10);
	CHECK(pread(fd, end, sizeof end, MAPPED_PAGES * PAGE) == 0);
	static char pages[PAGE + 2];
	CHECK(pread(fd, pages, PAGE + 2, 5 * PAGE - 1) == PAGE + 2);
	CHECK(pages[0] == 0 && pages[1] == version && pages[PAGE + 1] == version);
}

static void mapped(void)
{
	int new = open("mapped", O_RDWR | O_CREAT | O_TRUNC, 0644);
	write_pages(new, 1);
	close(new);
	fd = open("mapped", O_RDONLY);
	CHECK(fd >= 0);
	read_pages(20, 1);
	/* Another process, whose open breaks the lease. */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		_exit(system("printf '\\2' | dd of=mapped conv=notrunc bs=1 seek=0 2>/dev/null") != 0);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(pread(fd, page, 1, 0) == 1 && page[0] == 2);
	close(fd);
	/* Descriptors that write: the first write ends the mapping. */
	fd = open("mapped", O_RDWR);
	write_pages(fd, 1);
	close(fd);
	fd = open("mapped", O_RDWR);
	read_pages(20, 1);
	write_pages(fd, 3);
	read_pages(3, 3);
	CHECK(ftruncate(fd, PAGE) == 0);
	check_page(0, 3);
	CHECK(pread(fd, page, PAGE, PAGE) == 0);
	close(fd);
}

int main(int count, char **arguments)
{
	CHECK(count >= 2);
	const char *what = arguments[1];
	if (strcmp(what, "closed") == 0)
		closed();
	else if (strcmp(what, "renamed") == 0)
		renamed(arguments[2]);
	else if (strcmp(what, "forked") == 0)
		forked();
	else if (strcmp(what, "flags") == 0)
		changed(append_by_flag, 6, 200);
	else if (strcmp(what, "status") == 0)
		changed(set_append, 1, 200);
	else if (strcmp(what, "mapped") == 0)
		mapped();
	else
		return 2;
	return 0;
}
