//! Tests of report outputs: verdicts, documents, and the page of plots, in a real browser.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millpond-bench")).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A made-up subject and its baseline.
fn pair(
    suite: &str,
    case: &str,
    engines: [&str; 2],
    at: [Option<u32>; 3],
    ratio: f64,
) -> [Value; 2] {
    let [threads, depth, block] = at;
    let row = |engine: &str, ops_per_s: f64, ratio: Option<f64>| {
        json!({
            "suite": suite, "case": case, "engine": engine, "threads": threads.unwrap_or(1),
            "block_bytes": block, "queue_depth": depth, "ops_per_s": ops_per_s, "ns_per_op": 1e9 / ops_per_s,
            "cpu_ns_per_op": 1e9 / ops_per_s, "context_switches_per_op": 0.01, "p50_ns": 100.0,
            "p99_ns": 200.0, "p999_ns": 300.0, "torn_reads": null, "rounds": 5,
            "ratio_to": ratio.map(|_| engines[1]), "ratio_median": ratio,
            "ratio_q1": ratio.map(|ratio| ratio * 0.95), "ratio_q3": ratio.map(|ratio| ratio * 1.05),
        })
    };
    [row(engines[0], 1e6 * ratio, Some(ratio)), row(engines[1], 1e6, None)]
}

/// A report with rows of each section; those of the range lock are `scale` times as fast.
fn report(scale: f64) -> Value {
    let mut rows = Vec::new();
    for threads in [1, 2, 4, 8] {
        for (case, ratio) in [("random-4k", 2.0), ("pread3-4k", 9.5), ("read2-4k", 12.0)] {
            let at = [Some(threads), None, Some(4096)];
            for peer in ["kernel pread", "memcpy", "mmap", "millpond, hit path off"] {
                rows.extend(pair(
                    "cached-read",
                    case,
                    ["millpond", peer],
                    at,
                    ratio / f64::from(threads),
                ));
            }
        }
        for peer in
            ["interval-tree", "olc-btree", "parking_lot RwLock, shared", "std BTreeMap in a Mutex"]
        {
            for case in ["1-held-disjoint", "100-held-disjoint", "100-held-interleaved"] {
                let at = [Some(threads), None, None];
                rows.extend(pair("range-lock", case, ["striped", peer], at, scale * 40.0));
            }
        }
    }
    for depth in [1, 2, 4, 8, 16, 32, 64] {
        let at = [Some(1), Some(depth), Some(4096)];
        for peer in ["io_uring, O_DIRECT", "io_uring, buffered, forced to workers", "preadv loop"] {
            rows.extend(pair("async-read", "cold-random-4k", ["millpond, queue", peer], at, 0.93));
        }
    }
    for (case, block) in [("null-read-512", 512), ("null-read-4k", 4096), ("null-read-64k", 65536)]
    {
        let at = [Some(1), Some(128), Some(block)];
        let engines = ["millpond, null", "millpond, null, vectors copied"];
        rows.extend(pair("no-copy", case, engines, at, 1.5));
    }
    let at = [Some(8), None, Some(8192)];
    for (case, ratio) in [("warm-8k-8+8-reads", 1.3), ("beyond-8k-8+8-writes", 0.02)] {
        rows.extend(pair("mixed", case, ["millpond, xfs loop", "kernel, xfs loop"], at, ratio));
    }
    let at = [Some(4), None, Some(4096)];
    rows.extend(pair(
        "wakeups",
        "4-waiters-min-8",
        ["millpond, one wake-up per batch", "kernel AIO"],
        at,
        1.0,
    ));
    rows.extend(pair(
        "write",
        "commit",
        ["millpond, back, direct", "kernel pwrite, O_DIRECT, O_DSYNC"],
        at,
        0.9,
    ));
    rows.extend(pair("stalls", "append-back", ["millpond, back", "kernel O_APPEND"], at, 120.0));
    rows.extend(pair("around-the-hit", "miss-4k", ["millpond", "kernel pread"], at, 0.4));
    rows.extend(pair("programs", "tar-create", ["run", "kernel"], at, 0.99));
    json!({
        "suite": "all", "command": "millpond-bench all --quick <made up>",
        "machine": {
            "millpond": "0.1.0", "optimized": true, "cpu": "made up", "cores": 2, "memory_bytes": 1u64 << 34,
            "kernel": "6.18", "architecture": "x86_64", "huge_pages": "madvise", "file_system": "ext2/3/4",
        },
        "rows": rows,
        "skipped": [{"suite": "write", "case": "commit", "engine": "none", "reason": "not <here>"}],
        "notes": ["a note"],
    })
}

fn saved(dir: &Path, name: &str, report: &Value) -> String {
    let file = dir.join(name);
    fs::write(&file, serde_json::to_vec(report).unwrap()).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn comparisons_end_as_they_found() {
    let dir = tempfile::tempdir().unwrap();
    let [before, after] =
        [1.0, 0.5].map(|scale| saved(dir.path(), &format!("{scale}"), &report(scale)));
    let json = dir.path().join("verdicts");
    let output = bench(&["compare", &before, &after, "--json", json.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("48 slower, 0 gone, 0 faster"),
        "{}",
        text(&output.stdout)
    );
    let verdicts: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let slower = verdicts["changes"].as_array().unwrap().iter();
    assert_eq!(slower.filter(|change| change["verdict"] == "slower").count(), 48);
    let output = bench(&["compare", &after, &before]);
    assert!(output.status.success() && text(&output.stdout).contains("48 faster"));
    let output = bench(&["compare", &before, "/dev/null"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/dev/null: not a report"), "{}", text(&output.stderr));
}

#[test]
fn documents_get_the_figures_of_reports() {
    let dir = tempfile::tempdir().unwrap();
    let made_up = saved(dir.path(), "report", &report(1.0));
    let document = dir.path().join("document.md");
    let markers = ["machine", "mixed", "nothing"].map(|name| {
        format!("by hand\n<!-- figures: {name} -->\nold {name}\n<!-- end of figures -->\n")
    });
    fs::write(&document, markers.concat()).unwrap();
    let document = document.to_str().unwrap();
    let output = bench(&["figures", &made_up, "--into", document, "--commit", "c0ffee"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let filled = fs::read_to_string(document).unwrap();
    assert!(
        filled.contains("Commit c0ffee") && filled.contains("| processor | made up"),
        "{filled}"
    );
    assert!(
        filled.contains("`beyond-8k-8+8-writes` | 8 |") && filled.contains("**missed** (0.02)")
    );
    assert!(filled.contains("old nothing") && !filled.contains("old mixed"), "{filled}");
    assert_eq!(filled.matches("by hand").count(), 3);

    let pictures = dir.path().join("pictures");
    let output = bench(&["figures", &made_up, "--svg", pictures.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for (name, told) in
        [("mixed.svg", "beyond-8k-8+8-writes"), ("async-read-cold-random-4k.svg", "io_uring")]
    {
        let svg = fs::read_to_string(pictures.join(name)).unwrap();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{name}");
        assert!(svg.contains(told) && !svg.contains("currentColor"), "{name}: {svg}");
    }
    fs::write(document, "<!-- figures: mixed -->\n").unwrap();
    let output = bench(&["figures", &made_up, "--into", document]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no end of the figures of mixed"));
}

/// A script that checks the page that contains it, and lists the defects.
const LOOK: &str = r"<script>
const wrong = [];
const apart = (a, b, by) => a.right - by <= b.left || b.right - by <= a.left || a.bottom - by <= b.top
    || b.bottom - by <= a.top;
const meeting = (all, by) => {
    for (let i = 0; i < all.length; i++) for (let j = i + 1; j < all.length; j++)
        if (!apart(all[i].getBoundingClientRect(), all[j].getBoundingClientRect(), by))
            wrong.push(`overlap: ${all[i].textContent.slice(0, 60)} | ${all[j].textContent.slice(0, 60)}`);
};
if (document.documentElement.scrollWidth > innerWidth)
    wrong.push(`wider than the window: ${document.documentElement.scrollWidth}`);
const svgs = [...document.querySelectorAll('svg')];
meeting([...document.querySelectorAll('figure')], 0);
for (const svg of svgs) {
    const shapes = [...svg.querySelectorAll('rect,circle')].filter(one => one.getBoundingClientRect().width > 0);
    const at = svg.getBoundingClientRect();
    if (!shapes.length || at.width < 200) wrong.push(`empty plot: ${svg.closest('figure')?.textContent}`);
    const texts = [...svg.querySelectorAll('text')].filter(one => one.textContent.trim());
    meeting(texts, 2);
    for (const one of texts) {
        const box = one.getBoundingClientRect();
        if (box.left < at.left - 1 || box.right > at.right + 1 || box.top < at.top - 1 || box.bottom > at.bottom + 1)
            wrong.push(`cut off: ${one.textContent}`);
    }
}
const light = color => color.match(/\d+/g).slice(0, 3).reduce((sum, part) => sum + +part, 0) / 765;
const style = getComputedStyle(document.body);
const ink = svgs.length ? getComputedStyle(svgs[0].querySelector('text')).fill : 'rgb(0,0,0)';
const seen = {plots: svgs.length, width: innerWidth, paper: light(style.backgroundColor), ink: light(ink), wrong};
document.body.innerHTML = '<pre>SEEN' + JSON.stringify(seen).replace(/</g, ' ') + 'END</pre>';
</script>";

/// The defects and a picture of a page in a window of this width, dark or light.
fn seen(page: &Path, width: u32, is_dark: bool) -> Value {
    let scheme = if is_dark { 0 } else { 1 };
    let browser = |words: &[String], page: &Path| {
        let output = Command::new("chromium-headless-shell")
            .args(["--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"])
            .arg(format!("--window-size={width},3000"))
            .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
            .args(words)
            .arg(format!("file://{}", page.display()))
            .output()
            .unwrap();
        let complaints = text(&output.stderr);
        assert!(!complaints.contains("CONSOLE"), "{complaints}");
        text(&output.stdout)
    };
    let picture = page.with_extension(format!("{width}-{scheme}.png"));
    browser(&[format!("--screenshot={}", picture.display())], page);
    assert!(fs::metadata(&picture).unwrap().len() > 10_000, "an empty picture");
    let looking = page.with_extension("look.html");
    fs::write(
        &looking,
        fs::read_to_string(page).unwrap().replace("</body>", &format!("{LOOK}</body>")),
    )
    .unwrap();
    let dom = browser(&["--dump-dom".into()], &looking);
    let found = dom.split_once("SEEN").and_then(|(_, rest)| rest.split_once("END"));
    let found = found.unwrap_or_else(|| panic!("nothing seen: {dom}")).0;
    serde_json::from_str(&found.replace("&amp;", "&").replace("&gt;", ">")).unwrap()
}

/// Goal: nothing overlaps, is cut off or empty, on a phone and on a wide screen, light and dark; and the
/// test would find it.
#[test]
fn the_page_can_be_read_in_a_browser() {
    if Command::new("chromium-headless-shell").arg("--version").output().is_err() {
        return skip::skip("chromium-headless-shell is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("report.html");
    let made_up = saved(dir.path(), "report", &report(1.0));
    let output = bench(&["figures", &made_up, "--html", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::metadata(&page).unwrap().len() < 1 << 20);
    for (width, is_dark) in [(400, false), (400, true), (1400, false), (1400, true)] {
        let seen = seen(&page, width, is_dark);
        assert_eq!(seen["wrong"], json!([]), "{width} pixels, dark: {is_dark}");
        assert_eq!(seen["width"], width);
        assert!(seen["plots"].as_u64().unwrap() > 15, "{seen}");
        let (paper, ink) = (seen["paper"].as_f64().unwrap(), seen["ink"].as_f64().unwrap());
        assert!(
            if is_dark { paper < 0.2 && ink > 0.7 } else { paper > 0.9 && ink < 0.3 },
            "{seen}"
        );
    }
    let broken = dir.path().join("broken.html");
    let svg = "<figure><svg viewBox='0 0 360 90' width='360'><text x='9' y='20'>one</text>\
               <text x='12' y='22'>two</text><text x='350' y='60'>three, cut off</text></svg></figure>\
               <div style='width:3000px'>wide</div>";
    let whole = fs::read_to_string(&page).unwrap();
    fs::write(&broken, whole.replace("</body>", &format!("{svg}</body>"))).unwrap();
    let wrong = seen(&broken, 1400, false)["wrong"].to_string();
    for what in ["overlap: one | two", "empty plot", "cut off: three", "wider than the window"] {
        assert!(wrong.contains(what), "{what}: {wrong}");
    }
}

/// Goal: an interrupted benchmark leaves no file and no process, and prints no progress without a terminal.
#[test]
fn an_interrupt_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_millpond-bench"))
        .args(["around-the-hit", "--case", "open-read-close", "--dir"])
        .arg(dir.path())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Waits until it has made a file.
    while fs::read_dir(dir.path()).unwrap().count() == 0 {
        assert!(child.try_wait().unwrap().is_none(), "over already");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(text(&output.stderr), "");
    let left: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Goal: the command that regenerates all results of the documents works, and a dry run does not change the
/// documents.
#[test]
fn all_figures_are_made_by_one_command() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let out = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let before = fs::read_to_string(root.join("docs/benchmarks.md")).unwrap();
    let output = Command::new(root.join("scripts/figures"))
        .args(["--quick", "--without-programs"])
        .envs([("MILLPOND_BENCH", env!("CARGO_BIN_EXE_millpond-bench")), ("FIGURES_SHRINK", "64")])
        .envs([("FIGURES_SUITES", "no-copy"), ("CARGO_TARGET_DIR", out.path().to_str().unwrap())])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read_to_string(root.join("docs/benchmarks.md")).unwrap(), before);
    let made = out.path().join("figures");
    let tried = fs::read_to_string(made.join("tried.md")).unwrap();
    assert!(tried.contains("| `null-read-64k` | 1, 128 | millpond, null |"), "{tried}");
    assert!(tried.contains("| processor | ") && tried.contains("Commit "), "{tried}");
    assert!(fs::read_to_string(made.join("report.html")).unwrap().contains("<svg"));
    // A place for the results of each suite.
    for suite in [
        "cached-read",
        "around-the-hit",
        "async-read",
        "wakeups",
        "write",
        "no-copy",
        "mixed",
        "stalls",
        "range-lock",
        "programs",
    ] {
        assert!(before.contains(&format!("<!-- figures: {suite} -->")), "{suite}");
    }
}
