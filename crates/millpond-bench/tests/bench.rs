//! `millpond-bench` with tiny parameters: tests that it runs and its report is complete, not the results.

#[path = "../../millpond-cli/tests/common/executable.rs"]
mod executable;
#[path = "common/needs_millpond.rs"]
mod needs_millpond;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs;
use std::process::{Command, Output};
use std::sync::Mutex;

use executable::executable;
use needs_millpond::has_millpond;
use serde_json::Value;

/// One at a time: threads of the lock benchmarks would take processor time from fio.
static MEASURING: Mutex<()> = Mutex::new(());

fn bench(words: &[&str]) -> Output {
    let _alone = MEASURING.lock().unwrap();
    Command::new(env!("CARGO_BIN_EXE_millpond-bench")).args(words).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn bad_arguments_are_refused() {
    for (words, message) in [
        (
            &["no-such-suite"][..],
            "cached-read, around-the-hit, async-read, wakeups, write, no-copy, mixed, stalls, range-lock, shared, untorn, programs, all",
        ),
        (&["cached-read", "--dir", "/no/such"], "/no/such"),
        (&["cached-read", "--dir", "/dev/null"], "not a directory"),
        (&["cached-read", "--json", "/no/such/file"], "/no/such/file"),
        (&["cached-read", "--case", "no-such-case"], "no case has such a name"),
    ] {
        let output = bench(words);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{words:?}");
        assert!(stderr(&output).contains(message), "{message:?} in {}", stderr(&output));
    }
}

#[test]
fn cached_read_reports_every_case_and_baseline() {
    let dir = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let (json, html) = (out.path().join("figures.json"), out.path().join("figures.html"));
    let words = [
        "cached-read",
        "--quick",
        "--shrink",
        "64",
        "--dir",
        dir.path().to_str().unwrap(),
        "--json",
        json.to_str().unwrap(),
        "--html",
        html.to_str().unwrap(),
    ];
    let output = bench(&words);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["suite"], "cached-read");
    assert!(report["machine"]["cpu"].is_string());
    let rows = report["rows"].as_array().unwrap();
    for row in rows {
        for figure in ["ops_per_s", "ns_per_op", "threads", "block_bytes"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} in {row}");
        }
        // fio counts processor time too coarsely for these milliseconds.
        for figure in ["cpu_ns_per_op", "context_switches_per_op"] {
            assert!(row[figure].as_f64().unwrap() >= 0.0, "{figure} in {row}");
        }
        if row["ratio_to"].is_string() {
            let at = |name: &str| row[name].as_f64().unwrap();
            assert!(at("ratio_q1") <= at("ratio_median") && at("ratio_median") <= at("ratio_q3"));
        }
    }

    // Each engine has a result or a reason: none is left out.
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().all(|gap| !gap["reason"].as_str().unwrap().is_empty()));
    let told = |case: &str, engine: &str| {
        rows.iter().chain(skipped).any(|row| row["case"] == case && row["engine"] == engine)
    };
    for case in ["random-4k", "random-16k", "read2-4k", "pread3-4k", "sequential-512"] {
        for engine in ["millpond", "kernel pread", "memcpy", "mmap"] {
            assert!(told(case, engine), "{case}: {engine}");
        }
        let scaled = rows.iter().any(|row| row["case"] == case && row["threads"] == 2);
        assert_eq!(scaled, case != "sequential-512", "{case}");
    }
    assert!(told("random-4k", "millpond, hit path off"));
    assert!(told("cold-random-4k", "kernel pread, O_DIRECT"));
    for case in ["fio-randread-4k-16m", "fio-randread-4k-256m"] {
        for engine in ["fio, kernel", "fio, millpond run", "fio, memcpy shim"] {
            assert!(told(case, engine), "{case}: {engine}");
        }
    }

    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("x kernel pread ("), "{table}");
    let page = fs::read_to_string(&html).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg"));
}

#[test]
fn range_lock_reports_every_case_and_baseline() {
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let words = ["range-lock", "--quick", "--shrink", "64", "--json", json.to_str().unwrap()];
    let output = bench(&words);
    assert!(output.status.success(), "{}", stderr(&output));

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["suite"], "range-lock");
    let rows = report["rows"].as_array().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().all(|gap| !gap["reason"].as_str().unwrap().is_empty()));
    let told = |case: &str, engine: &str| {
        rows.iter().chain(skipped).any(|row| row["case"] == case && row["engine"] == engine)
    };
    let contended = ["same-range", "full-range"];
    let others = [
        "1-held-disjoint",
        "1-held-interleaved",
        "100-held-disjoint",
        "100-held-interleaved",
        "shared-same-range",
        "shared-full-range",
        "50000-held",
    ];
    for case in contended.into_iter().chain(others) {
        for engine in ["whole-file", "interval-tree", "mutex-btree", "olc-btree"] {
            assert!(told(case, "striped") && told(case, engine), "{case}: {engine}");
        }
        assert!(told(case, "std BTreeMap in a Mutex"), "{case}");
        let rwlock = if contended.contains(&case) { "fair" } else { "shared" };
        assert!(told(case, &format!("parking_lot RwLock, {rwlock}")), "{case}");
    }
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["block_bytes"].is_null() && row["queue_depth"].is_null(), "{row}");
        assert_eq!(row["ratio_to"].is_string(), row["engine"] == "striped", "{row}");
        let contended = contended.iter().any(|case| row["case"] == *case);
        assert_eq!(row["p999_ns"].is_f64(), contended, "{row}");
    }
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    let most = rows.iter().filter_map(|row| row["threads"].as_u64()).max();
    assert_eq!(most, Some(4 * cores));
}

#[test]
fn no_copy_reports_every_case_and_baseline() {
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let words = ["no-copy", "--quick", "--shrink", "64", "--json", json.to_str().unwrap()];
    let output = bench(&words);
    assert!(output.status.success(), "{}", stderr(&output));

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["suite"], "no-copy");
    let rows = report["rows"].as_array().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().all(|gap| !gap["reason"].as_str().unwrap().is_empty()));
    let told = |case: &str, engine: &str| {
        rows.iter().chain(skipped).any(|row| row["case"] == case && row["engine"] == engine)
    };
    for size in ["512", "4k", "8k", "16k", "32k", "64k"] {
        let case = format!("null-read-{size}");
        assert!(told(&case, "millpond, null, vectors copied"), "{case}");
        let larger = !matches!(size, "512" | "4k");
        assert_eq!(told(&case, "millpond, null, 4 KiB"), larger, "{case}");
        // Of a few hundred requests; in debug builds the range lock's list of holders may grow.
        let notes = report["notes"].as_array().unwrap();
        let told = |note: &Value| -> Option<f64> {
            let text = note.as_str()?.strip_prefix(&format!("{case}: "))?;
            text.split_once(" allocations per request")?.0.parse().ok()
        };
        let allocations = notes.iter().find_map(told).expect("a note");
        assert!(allocations < 0.05, "{case}: {allocations} allocations per request");
    }
    for case in ["null-read-4k", "null-write-4k"] {
        assert!(told(case, "io_uring NOP, 32 at once"), "{case}");
    }
    for case in ["direct-read-4k-random", "direct-read-1m", "direct-write-1m"] {
        let fio = "fio, io_uring, O_DIRECT, fixed";
        assert!(told(case, fio), "{case}");
        // Measured only together with fio, which needs io_uring.
        let without_fio = skipped.iter().any(|gap| gap["case"] == case && gap["engine"] == fio);
        assert!(without_fio || told(case, "millpond, direct"), "{case}");
    }
}

#[test]
fn write_reports_every_case_and_baseline() {
    let dir = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let mut words = vec!["write", "--quick", "--shrink", "64"];
    words.extend(["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()]);
    let output = bench(&words);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["suite"], "write");
    let rows = report["rows"].as_array().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().all(|gap| !gap["reason"].as_str().unwrap().is_empty()));
    let told = |case: &str, engine: &str| {
        rows.iter().chain(skipped).any(|row| row["case"] == case && row["engine"] == engine)
    };
    let (back, synced) = ("millpond, back, direct", "kernel pwrite, fdatasync");
    for (case, engines) in [
        ("sequential-1m", &[back, "fio, io_uring, O_DIRECT", synced][..]),
        ("sequential-1m-overwrite", &[back, "fio, io_uring, O_DIRECT", synced]),
        ("random-4k-sync", &[back, synced]),
        ("commit", &[back, "millpond, through, direct", synced]),
        ("commit", &["kernel pwrite, O_DIRECT, O_DSYNC"]),
        ("through-4k", &["millpond, through", "kernel pwrite"]),
    ] {
        for engine in engines {
            assert!(told(case, engine), "{case}: {engine}");
        }
    }
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["p999_ns"].is_f64(), row["case"] == "commit", "{row}");
        let fio = row["engine"].as_str().unwrap().starts_with("fio");
        assert_eq!(row["queue_depth"].is_u64(), fio, "{row}");
    }
}

#[test]
fn stalls_reports_every_case_and_baseline() {
    // On a disk, for O_DIRECT.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let mut words = vec!["stalls", "--quick", "--shrink", "64"];
    words.extend(["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()]);
    let output = bench(&words);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["suite"], "stalls");
    let rows = report["rows"].as_array().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().all(|gap| !gap["reason"].as_str().unwrap().is_empty()));
    let told = |case: &str, engine: &str| {
        rows.iter().chain(skipped).any(|row| row["case"] == case && row["engine"] == engine)
    };
    let (evicting, resting) = ("millpond, back, one eviction", "millpond, back, no eviction");
    let stopped = "millpond, back, direct, writers stopped before";
    for (case, engines) in [
        ("sync-under-writers", ["millpond, back, direct", "kernel pwrite, fdatasync"]),
        ("sync-under-writers", ["millpond, back, direct", stopped]),
        ("append-through", ["millpond, through", "kernel O_APPEND"]),
        ("append-through-dsync", ["millpond, through, dsync", "kernel O_APPEND, O_DSYNC"]),
        ("append-back", ["millpond, back", "kernel O_APPEND"]),
        ("evict-256m", [evicting, resting]),
        ("evict-4g", [evicting, resting]),
    ] {
        for engine in engines {
            assert!(told(case, engine), "{case}: {engine}");
        }
        // The note has the longest wait and its target.
        let mut notes = report["notes"].as_array().unwrap().iter().filter_map(Value::as_str);
        let is_skipped = skipped.iter().any(|gap| gap["case"] == case);
        let note = notes.any(|note| note.starts_with(case) && note.contains("target "));
        assert!(note || is_skipped, "{case}: {}", report["notes"]);
    }
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        let at = |name: &str| row[name].as_f64().unwrap();
        assert!(at("p50_ns") <= at("p99_ns") && at("p99_ns") <= at("p999_ns"), "{row}");
    }
}

#[test]
fn mixed_reports_every_case_and_baseline() {
    let dir = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let mut words = vec!["mixed", "--quick", "--shrink", "128"];
    words.extend(["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()]);
    let output = bench(&words);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["suite"], "mixed");
    let rows = report["rows"].as_array().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().all(|gap| !gap["reason"].as_str().unwrap().is_empty()));
    // A gap is reported once for a case's reads and writes together.
    let told = |case: &str, engine: &str| {
        let is_of = |row: &&Value| row["case"].as_str().unwrap().starts_with(case);
        let is_by = |row: &&Value| row["engine"].as_str().unwrap().ends_with(engine);
        rows.iter().chain(skipped).filter(is_of).any(|row| is_by(&row))
    };
    for cache in ["warm", "beyond"] {
        for block in ["8k", "64k"] {
            for threads in ["1+1", "4+4", "8+8"] {
                let case = format!("{cache}-{block}-{threads}");
                for engine in ["millpond", "ext4 loop", "xfs loop"] {
                    assert!(told(&case, engine), "{case}: {engine}");
                }
            }
        }
    }
    for case in ["writers-8k-8", "hammer-4k-1+1", "synced-8k-1"] {
        for engine in ["millpond", "kernel, ext4 loop", "kernel, xfs loop"] {
            assert!(told(case, engine), "{case}: {engine}");
        }
    }
    assert!(told("extents-8k-1+1", "another file is changed"));
    assert!(told("beyond-8k-8+8", "O_DIRECT"));
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        let reads = row["case"].as_str().unwrap().ends_with("-reads");
        assert_eq!(row["torn_reads"].is_u64(), reads, "{row}");
        if reads && row["engine"].as_str().unwrap().starts_with("millpond") {
            assert_eq!(row["torn_reads"], 0, "{row}");
        }
    }
}

#[test]
fn around_the_hit_reports_every_case_and_baseline() {
    let dir = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let words = ["around-the-hit", "--quick", "--shrink", "64"];
    let places = ["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()];
    let output = bench(&[&words[..], &places[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");

    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    let told = |case: &str, peer: &str, threads: u32| {
        let is_of = |row: &&Value| row["case"] == case && row["suite"] == "around-the-hit";
        let measured = rows.iter().filter(is_of).any(|row| {
            row["threads"] == threads
                && row["ratio_to"].as_str().is_some_and(|to| to.starts_with(peer))
        });
        measured || skipped.iter().any(|gap| gap["case"] == case)
    };
    for threads in [1, 2] {
        assert!(told("miss-4k", "kernel pread", threads));
        for mode in ["back", "through"] {
            for files in ["one", "each"] {
                let case = format!("overwrite-4k-{mode}-{files}");
                assert!(told(&case, "kernel pwrite", threads), "{case}: {threads}");
            }
        }
    }
    assert!(told("open-read-close", "kernel open", 1));
    assert!(told("direct-null-pipeline", "io_uring NOP", 1));
    assert!(told("direct-null-queue", "io_uring NOP", 1));
    assert!(told("open-files-write-sync", "millpond, null", 1));
    let depth = |case: &str| &rows.iter().find(|row| row["case"] == case).unwrap()["queue_depth"];
    assert_eq!(depth("direct-null-queue"), 32);
    assert!(depth("miss-4k").is_null());
    // Otherwise the case measures hits.
    let notes = report["notes"].as_array().unwrap();
    let missed = |note: &&Value| note.as_str().unwrap().starts_with("miss-4k");
    assert!(notes.iter().filter(missed).count() >= 2);
}

/// Goal: each case of shared hits is measured, or says why not; with small pages each is measured.
#[test]
fn shared_reports_every_case() {
    let dir = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let words = ["shared", "--quick", "--shrink", "64"];
    let places = ["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()];
    let output = bench(&[&words[..], &places[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");
    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let has = |list: &str, case: &str| {
        report[list].as_array().unwrap().iter().any(|row| row["case"] == case)
    };
    for size in ["64", "4k", "64k"] {
        for set in ["1m", "256m"] {
            assert!(has("rows", &format!("hit-{size}-{set}-small")));
            let huge = format!("hit-{size}-{set}-huge");
            assert!(has("rows", &huge) || has("skipped", &huge));
        }
    }
}

#[test]
fn async_read_and_wakeups_report_every_case_and_baseline() {
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let (queue, waiters) = ("millpond, queue", "millpond, one wake-up per batch");
    for (suite, cases) in [
        (
            "async-read",
            &[
                ("cold-random-4k", &["io_uring, O_DIRECT", "io_uring, buffered", queue][..]),
                ("cold-random-4k", &["io_uring, buffered, forced to workers", "preadv loop"]),
                ("cold-random-4k", &["millpond, read_at"]),
                ("cached-random-4k", &["millpond, future", "millpond, read_at"]),
                ("fio-libaio-cold-4k", &["fio libaio, kernel", "fio libaio, O_DIRECT"]),
                ("fio-libaio-cold-4k", &["fio libaio, millpond run"]),
            ][..],
        ),
        (
            "wakeups",
            &[
                ("1-waiter-min-32", &[waiters, "millpond, woken per event", "kernel AIO"]),
                ("4-waiters-min-1-2-8-32", &[waiters, "kernel AIO"]),
            ],
        ),
    ] {
        // On a disk, for O_DIRECT.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut words = vec![suite, "--quick", "--shrink", "64"];
        words.extend(["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()]);
        let output = bench(&words);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");
        let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        assert_eq!(report["suite"], suite);
        let rows = report["rows"].as_array().unwrap();
        let skipped = report["skipped"].as_array().unwrap();
        for (case, engines) in cases {
            for engine in *engines {
                let mut all = rows.iter().chain(skipped);
                let told = all.any(|row| row["case"] == *case && row["engine"] == *engine);
                assert!(told, "{case}: {engine}");
            }
        }
        for row in rows {
            let has_depth = row["case"] != "cached-random-4k" && suite == "async-read";
            assert_eq!(row["queue_depth"].is_u64(), has_depth, "{row}");
            assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
}

/// The report of `programs` for the cases whose name contains `case`, with the given PATH.
fn programs(case: &str, path: &str) -> (Output, Value) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("figures.json");
    let mut words = vec!["programs", "--quick", "--shrink", "64", "--case", case];
    words.extend(["--dir", dir.path().to_str().unwrap(), "--json", json.to_str().unwrap()]);
    let _alone = MEASURING.lock().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond-bench"));
    let output = command.args(words).env("PATH", path).output().unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "files stay behind");
    let report = fs::read(&json).unwrap();
    let report = serde_json::from_slice(&report).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    (output, report)
}

#[test]
fn programs_reports_both_sides_and_what_was_reached() {
    if !has_millpond() {
        return;
    }
    let (output, report) = programs("tar-", &std::env::var("PATH").unwrap());
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(report["suite"], "programs");
    assert_eq!(report["skipped"].as_array().unwrap().len(), 0, "{}", report["skipped"]);
    let rows = report["rows"].as_array().unwrap();
    let told: Vec<_> = rows
        .iter()
        .map(|row| (row["case"].as_str().unwrap(), row["engine"].as_str().unwrap()))
        .collect();
    let cases = ["tar-create", "tar-extract"];
    assert_eq!(told, cases.map(|case| [(case, "run"), (case, "kernel")]).concat());
    for row in rows {
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        let ratio = row["ratio_median"].as_f64();
        assert_eq!(ratio.is_some_and(|ratio| ratio > 0.0), row["engine"] == "run", "{row}");
    }
    // `run` started them, and each result was compared.
    let notes: Vec<_> =
        report["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let told = |start: &str, text: &str| {
        notes.iter().any(|note| note.starts_with(start) && note.contains(text))
    };
    for case in cases {
        assert!(told(case, "1 threads: "), "{case}: {notes:?}");
        assert!(told("reached", case) || told("missed", case), "{case}: {notes:?}");
    }
}

/// Goal: a missing program is named, with the package that has it.
#[test]
fn programs_that_are_missing_are_told() {
    let (output, report) = programs("rsync", "/no/such");
    assert!(output.status.success(), "{}", stderr(&output));
    let skipped = report["skipped"].as_array().unwrap();
    let engines: Vec<_> = skipped.iter().filter_map(|gap| gap["engine"].as_str()).collect();
    assert_eq!(engines, ["run", "kernel"]);
    for gap in skipped {
        assert!(gap["reason"].as_str().unwrap().contains("package is rsync"), "{gap}");
    }
}

/// Goal: a program that exits, prints or writes differently under `run` is an error, and no result.
#[test]
fn programs_that_differ_under_run_fail() {
    if !has_millpond() {
        return;
    }
    for (differs, reason) in [
        ("exit 3", "exit status: 3"),
        ("echo other", "says \"other\", and on the kernel \"same\""),
        ("echo other >out; echo same", "leaves something else"),
    ] {
        let bin = tempfile::tempdir().unwrap();
        let script = format!(
            "#!/bin/sh\n: >out\n[ \"$LD_PRELOAD\" ] && {{ {differs}; exit; }}\necho same\n"
        );
        executable(bin.path(), "cp", script.as_bytes());
        let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
        let (output, report) = programs("cp-file", &path);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert_eq!(report["rows"].as_array().unwrap().len(), 0, "{}", report["rows"]);
        let gap = &report["skipped"][0];
        assert_eq!((&gap["case"], &gap["engine"]), (&"cp-file".into(), &"run".into()));
        assert!(gap["reason"].as_str().unwrap().contains(reason), "{reason:?} in {gap}");
    }
}
