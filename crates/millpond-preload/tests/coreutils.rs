//! coreutils, grep, sed and awk on files: the same bytes as on the kernel alone, and served.

mod common;

use std::process::Command;

use common::{MODES, Mode, Pond, lines, require, succeed};

/// Runs each shell line with the library and without it, each in a directory of its own, and compares output and
/// files.
fn same(commands: &[&str], mode: Mode) -> common::Report {
    let (with, without) = (Pond::new().in_mode(mode), Pond::new());
    for pond in [&with, &without] {
        std::fs::write(pond.path("a"), lines(60_000)).unwrap();
        std::fs::write(pond.path("b"), lines(500)).unwrap();
    }
    for command in commands {
        let mut words = command.split_whitespace();
        let program = words.next().unwrap();
        let arguments: Vec<&str> = words.collect();
        let found = succeed(with.served(program).args(&arguments));
        let expected = succeed(without.plain(program).args(&arguments));
        assert!(found == expected, "{command}: the output differs");
    }
    let digest = "sha256sum * | sort";
    let expected = succeed(without.plain("sh").args(["-c", digest]));
    assert_eq!(succeed(with.plain("sh").args(["-c", digest])), expected);
    with.report()
}

#[test]
fn readers() {
    require("grep", "grep");
    let commands = [
        "cat a b",
        "wc a b",
        "wc -l a",
        "head -c 100000 a",
        "head -n 7 a",
        "tail -n 9 a",
        "tail -c 70000 a",
        "tail -c +500000 a",
        "cut -c 1-4 a",
        "sort a",
        "sort -n -k 2 a",
        "uniq a",
        "md5sum a b",
        "sha256sum a",
        "cksum a",
        "od -A d -j 1000 -N 5000 a",
        "tac a",
        "nl b",
        "fold -w 5 b",
        "paste a b",
        "join -j 2 b b",
        "comm b b",
        "cmp a a",
        "grep -c 77 a",
        "grep -n 1234 a",
        "sed -n 5,9p a",
        "awk {s+=$1}END{print(s)} a",
        "base64 b",
        "expand b",
        "fmt b",
        "tsort b",
        "shuf --random-source=a b",
    ];
    same(&commands, Mode::Through);
    // The others read by streams of libc.
    same(&commands, Mode::Back).assert_served(4 << 20);
}

#[test]
fn writers() {
    let commands = [
        "cp a c",
        "cp --sparse=always a d",
        "split -b 100000 a part.",
        "csplit -q -f cs. b 100 200",
        "truncate -s 12345 c",
        "truncate -s +5000 c",
        "truncate -s 500000 d",
        "sed -i s/1/22/ b",
        "cp b h",
        "mv h i",
        "ln i j",
        "cat j",
        "install -m 600 a k",
        "tee -a l",
        "touch m",
        "rm m",
        "cp -p a n",
        "touch -d 2001-02-03 n",
        "touch -d 2001-02-03 a b",
        "tar -cf o.tar a b n",
        "tar -xf o.tar --transform s/^/x/",
        "stat -c %s_%Y_%a n xn",
        "stat -c %s_%a xa",
    ];
    for mode in MODES {
        // Most of these copy by `copy_file_range`, for which the kernel gets the files.
        let report = same(&commands, mode);
        assert!(report.served_bytes > 4 << 20, "{}", report.lines);
        assert!(report.passed_for("changed") >= 2, "{}", report.lines);
    }
}

/// `sort -o` writes through libc's own standard output, and `dd` to its descriptor and from that of the standard input: those
/// bytes are passed to the kernel.
#[test]
fn output_by_the_standard_stream() {
    let commands = [
        "sort -r a -o c",
        "sort -n c -o c",
        "shred -n 1 --random-source=a -x b",
        "dd if=a of=e bs=1000 status=none",
        "dd if=a of=e bs=512 seek=3 skip=7 count=100 conv=notrunc status=none",
        "dd if=b of=f oflag=append conv=notrunc status=none",
        "dd if=a of=g bs=4k conv=fsync,sync status=none",
    ];
    for mode in MODES {
        let report = same(&commands, mode);
        assert!(report.lines.contains("passed:stdio="), "{}", report.lines);
    }
}

/// As by `millpond run`: the process prints the counts of all.
fn speaking(command: &mut Command) -> &mut Command {
    command.env_remove("MILLPOND_QUIET").env_remove("MILLPOND_TOTALS")
}

/// The report line for people goes to the stderr that the process started with, which coreutils close before they
/// exit.
#[test]
fn the_report_is_one_line_on_stderr() {
    let pond = Pond::new();
    std::fs::write(pond.path("a"), lines(1000)).unwrap();
    let output = common::finish(speaking(pond.served("cat").arg("a")));
    let text = String::from_utf8(output.stderr).unwrap();
    let size = std::fs::metadata(pond.path("a")).unwrap().len();
    let expected =
        format!("millpond: served 1 files, {size} bytes; passed 0 files, 0 bytes to the kernel\n");
    assert_eq!(text, expected);
    let output = common::finish(speaking(&mut pond.served("true")));
    assert!(output.stderr.is_empty(), "a program without files says nothing");
}

/// The report line counts a shell, its children and the programs that it executes as one program.
#[test]
fn children_are_part_of_the_report() {
    let pond = Pond::new();
    std::fs::write(pond.path("a"), lines(1000)).unwrap();
    let size = std::fs::metadata(pond.path("a")).unwrap().len();
    let script = "cat a >/dev/null; (cat a | wc -c) >/dev/null 2>err; exec tail -c 10 a";
    let output = common::finish(speaking(pond.served("sh").args(["-c", script])));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    let served = format!(" files, {} bytes; passed", 2 * size + 10);
    assert!(text.starts_with("millpond: served ") && text.contains(&served), "{text}");
    assert!(std::fs::read(pond.path("err")).unwrap().is_empty(), "a child spoke");
}
