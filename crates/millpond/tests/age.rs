//! Write-back by age.

use std::time::{Duration, Instant};

use millpond::{Engine, OpenOptions, WriteMode};

/// Goal: write-back of some pages of a file does not reset the age of its other dirty pages.
/// Incident: each sync of a range reset the age of all dirty pages. Beside a log, for example, an
/// old page never reached the file by age.
/// Method: one page is written once; another page is written and synced continuously. The first
/// page must reach the file.
#[test]
fn syncs_of_other_ranges_keep_the_age() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let age = Duration::from_millis(200);
    let engine = Engine::builder().cache_bytes(8 << 20).dirty_age_max(age).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let file = engine.open(&path, &options).unwrap();
    file.write_at(&[1; 4096], 0).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while std::fs::read(&path).unwrap()[0] == 0 {
        assert!(Instant::now() < deadline, "the page is not written back");
        file.write_at(&[2; 4096], 65536).unwrap();
        file.sync_range(65536, 4096).unwrap();
    }
}
