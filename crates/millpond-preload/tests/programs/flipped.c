/* A path that resolves to different files from one moment to the next. One thread flips a link by rename, between a
   file in the directory of the run and one outside. Other threads open it by several spellings of the path, read and
   write. Each descriptor refers to one file from its open to its close, and reads that file's bytes. flipped OUTSIDE
   ROUNDS */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "check.h"

enum { BYTES = 30000, THREADS = 3 };
static atomic_int over;
static char outside[4096];
static ino_t inodes[2];
static int rounds;

static void *flip(void *unused)
{
	const char *targets[2] = {"sub/inside", outside};
	(void)unused;
	for (int i = 0; !atomic_load(&over); i++) {
		unlink("new");
		CHECK(symlink(targets[i & 1], "new") == 0);
		CHECK(rename("new", "link") == 0);
	}
	return NULL;
}

/* All bytes of a file are one letter. Each file has its own case of letters, which all writers keep. */
static void check_bytes(const unsigned char *bytes, ssize_t len, int which)
{
	CHECK(len == BYTES);
	for (ssize_t i = 0; i < len; i++)
		CHECK(which ? bytes[i] >= 'A' && bytes[i] <= 'Z' : bytes[i] >= 'a' && bytes[i] <= 'z');
}

static void *use(void *number)
{
	static const char *paths[] = {"link", "./link", "sub/../link", "sub/.././sub/../link"};
	unsigned char bytes[BYTES];
	for (int i = 0; i < rounds; i++) {
		int fd = open(paths[i % 4], i % 3 ? O_RDWR : O_RDONLY);
		struct stat st;
		CHECK(fd >= 0 && fstat(fd, &st) == 0);
		int which = st.st_ino == inodes[1];
		CHECK(which || st.st_ino == inodes[0]);
		if (i % 3) {
			memset(bytes, (which ? 'A' : 'a') + (i + (long)number) % 26, BYTES);
			CHECK(pwrite(fd, bytes, BYTES, 0) == BYTES);
		}
		for (int again = 0; again < 3; again++)
			check_bytes(bytes, pread(fd, bytes, BYTES, 0), which);
		CHECK(close(fd) == 0);
	}
	return NULL;
}

static void make(const char *name, int which)
{
	static unsigned char bytes[BYTES];
	struct stat st;
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	memset(bytes, which ? 'A' : 'a', BYTES);
	CHECK(fd >= 0 && write(fd, bytes, BYTES) == BYTES && fstat(fd, &st) == 0 && close(fd) == 0);
	inodes[which] = st.st_ino;
}

int main(int argc, char **argv)
{
	pthread_t flipper, threads[THREADS];
	CHECK(argc == 3);
	snprintf(outside, sizeof outside, "%s", argv[1]);
	rounds = atoi(argv[2]);
	CHECK(mkdir("sub", 0755) == 0);
	make("sub/inside", 0);
	make(outside, 1);
	CHECK(symlink("sub/inside", "link") == 0);
	CHECK(pthread_create(&flipper, NULL, flip, NULL) == 0);
	for (long i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, use, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	atomic_store(&over, 1);
	CHECK(pthread_join(flipper, NULL) == 0);
	return 0;
}
