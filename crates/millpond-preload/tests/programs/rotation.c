/* Threads write numbered lines to one descriptor while dup2 replaces its file, as in the rotation of a log: the
 * files hold every line, in order. Prints nothing if that holds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "check.h"

enum { LINE = 64, FILES = 150, WRITERS = 3, UNKNOWN = -1 };

static int number = 100, pause_us, writers = 1, prints;
static volatile int is_over;

/* Returns the number of lines that it has written. */
static void *writer(void *which)
{
	char line[LINE + 1];
	long lines = 0;
	while (!is_over) {
		sprintf(line, "%ld %0*ld\n", (long)which, LINE - 3, lines++);
		if (prints && which)
			CHECK(fputs(line, stdout) >= 0 && fflush(stdout) == 0);
		else
			CHECK(write(number, line, LINE) == LINE);
		if (pause_us)
			usleep(pause_us);
	}
	return (void *)lines;
}

static int next_log(int i, int flags)
{
	char name[32];
	sprintf(name, "log.%d", i);
	int fd = open(name, O_CREAT | O_TRUNC | flags, 0644);
	CHECK(fd >= 0);
	return fd;
}

/* Checks the lines of a file: the lines of each writer continue from the number in `next`, if it has one. */
static void follow(const char *name, long next[])
{
	char line[LINE + 1] = "";
	int fd = open(name, O_RDONLY);
	FILE *f = fdopen(fd, "r");
	CHECK(f);
	size_t n;
	while ((n = fread(line, 1, LINE, f)) == LINE) {
		long which, number;
		CHECK(sscanf(line, "%ld %ld", &which, &number) == 2 && which >= 0 && which < WRITERS);
		if (next[which] != UNKNOWN && number != next[which]) {
			fprintf(stderr, "%s: writer %ld: line %ld where %ld should be\n", name, which, number, next[which]);
			_exit(1);
		}
		next[which] = number + 1;
	}
	CHECK(n == 0);
	fclose(f);
}

int main(int count, char **args)
{
	const char *how = args[1];
	int flags = O_WRONLY, first;
	long next[WRITERS] = {0};
	if (!strcmp(how, "slow"))
		pause_us = 20;
	if (!strcmp(how, "append"))
		flags |= O_APPEND;
	if (!strcmp(how, "both"))
		flags = O_RDWR;
	prints = !strcmp(how, "printed");
	if (!strcmp(how, "output") || prints)
		number = 1;
	if (!strcmp(how, "threads") || prints)
		writers = WRITERS;
	/* The kernel serves this first file until the first rotation. */
	if (!strcmp(how, "null") || !strcmp(how, "output")) {
		first = open("/dev/null", O_WRONLY);
		close(next_log(0, flags));
		next[0] = UNKNOWN;
	} else {
		first = next_log(0, flags);
		if (!strcmp(how, "passed"))
			open("log.0", O_RDWR);
	}
	CHECK(dup2(first, number) == number);
	close(first);
	pthread_t threads[WRITERS];
	for (long i = 0; i < writers; i++)
		pthread_create(&threads[i], NULL, writer, (void *)i);
	for (int i = 1; i < FILES; i++) {
		int fd = next_log(i, flags);
		usleep(1000);
		if (!strcmp(how, "dup3"))
			CHECK(dup3(fd, number, O_CLOEXEC) == number);
		else if (!strcmp(how, "number"))
			CHECK(syscall(SYS_dup3, fd, number, 0) == number);
		else
			CHECK(dup2(fd, number) == number);
		close(fd);
	}
	is_over = 1;
	long lines[WRITERS] = {0};
	for (int i = 0; i < writers; i++)
		pthread_join(threads[i], (void **)&lines[i]);
	CHECK(close(number) == 0);
	for (int i = 0; i < FILES; i++) {
		char name[32];
		sprintf(name, "log.%d", i);
		follow(name, next);
	}
	for (int i = 0; i < writers; i++)
		CHECK(next[i] == lines[i]);
	_exit(0);
}
