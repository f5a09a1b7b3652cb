/* Two programs write one SQLite database, this one in `args[1]` transactions. With `two` each goes through a
 * connection that was opened beside another one that is closed at once, as in a connection pool, while threads read
 * another file. Prints the number of acknowledged transactions; an error other than "busy" ends the program. */
#include <fcntl.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char page[128 << 10];
static int hot;

static void *hit(void *unused)
{
	static __thread char buffer[sizeof page];
	for (;;)
		pread(hot, buffer, sizeof buffer, 0);
}

static int is_busy(int code) { return (code & 0xff) == SQLITE_BUSY; }

static int run(sqlite3 *db, const char *sql)
{
	char *message = NULL;
	int code = sqlite3_exec(db, sql, NULL, NULL, &message);
	if (code != SQLITE_OK && !is_busy(code)) {
		fprintf(stderr, "error %d: %s\n", code, message);
		_exit(1);
	}
	sqlite3_free(message);
	return code;
}

int main(int count, char **args)
{
	int wanted = atoi(args[1]), acknowledged = 0, has_two = !strcmp(args[2], "two");
	if (has_two) {
		int fd = open("hot", O_RDWR | O_CREAT, 0644);
		write(fd, page, sizeof page);
		close(fd);
		hot = open("hot", O_RDONLY);
		for (int i = 0; i < 2; i++) {
			pthread_t thread;
			pthread_create(&thread, NULL, hit, NULL);
		}
	}
	while (acknowledged < wanted) {
		sqlite3 *first, *second;
		if (has_two)
			sqlite3_open("db", &first);
		sqlite3_open("db", &second);
		if (has_two)
			sqlite3_close(first);
		sqlite3_busy_timeout(second, 20000);
		int code = run(second,
			"pragma synchronous = off; begin immediate; update counter set n = n + 1;"
			"insert into data select randomblob(3000) from counter, (values (1), (2), (3), (4), (5)); commit");
		if (code == SQLITE_OK)
			acknowledged++;
		else if (!sqlite3_get_autocommit(second))
			run(second, "rollback");
		sqlite3_close(second);
		if (!has_two)
			usleep(500 + rand() % 2000);
	}
	printf("%d\n", acknowledged);
	fflush(stdout);
	_exit(0);
}
