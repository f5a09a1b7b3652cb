/* Reads a file often, changes it, and prints whether all results were right, with functions that every C library
   has. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
	char page[4096], found = 0;
	int right = 1;
	int fd = open("file", O_RDWR | O_CREAT | O_TRUNC, 0644);
	memset(page, 'e', sizeof page);
	for (int i = 0; i < 8; i++)
		right &= pwrite(fd, page, sizeof page, i * sizeof page) == sizeof page;
	for (int i = 0; i < 2000; i++)
		right &= pread(fd, page, sizeof page, i % 8 * sizeof page) == sizeof page && page[i] == 'e';
	right &= pwrite(fd, "f", 1, 5000) == 1 && pread(fd, &found, 1, 5000) == 1 && found == 'f';
	printf("%s\n", right ? "right" : "WRONG");
	return 7;
}
