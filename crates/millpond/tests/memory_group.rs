//! An engine in a memory cgroup takes a part of the group's limit. The process is not killed for want of memory.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::id;
use std::time::Duration;

use millpond::{Backing, Engine, WriteMode};

use common::{Random, in_own_process, read_write, scaled, temp_dir};

const GROUP_BYTES: u64 = 96 << 20;
/// Twice the group's limit.
const FILE_BYTES: u64 = 192 << 20;
const PAGE: usize = 4096;

/// A memory cgroup with this process in it.
struct Group {
    group: PathBuf,
    home: PathBuf,
}

impl Group {
    /// Below the process's own group in version 1, and beside it in version 2. The error says why there is none.
    fn enter() -> Result<Group, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = |controller: &str| {
            let mut lines = groups.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
            let line = lines.find(|line| line[1].split(',').any(|name| name == controller))?;
            Some(line[2].trim_start_matches('/').to_string())
        };
        let name = format!("millpond-test-{}", id());
        let first = Path::new("/sys/fs/cgroup/memory");
        let (home, group, file) = match own("memory").filter(|_| first.exists()) {
            Some(own) => (first.join(&own), first.join(own).join(name), "memory.limit_in_bytes"),
            None => {
                let home = Path::new("/sys/fs/cgroup").join(own("").unwrap_or_default());
                let parent = home.parent().unwrap_or(&home).to_owned();
                (home, parent.join(name), "memory.max")
            }
        };
        let describe = |error: std::io::Error| format!("{}: {error}", group.display());
        fs::create_dir(&group).map_err(describe)?;
        let made = fs::write(group.join(file), GROUP_BYTES.to_string())
            .and_then(|()| fs::write(group.join("cgroup.procs"), id().to_string()));
        if let Err(error) = made {
            let _ = fs::remove_dir(&group);
            return Err(describe(error));
        }
        Ok(Group { group, home })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.home.join("cgroup.procs"), id().to_string());
        let _ = fs::remove_dir(&self.group);
    }
}

fn content(page: u64, version: u8) -> [u8; PAGE] {
    [(page % 241) as u8 ^ version; PAGE]
}

/// Goal: an engine with the default limit works within the limit of its memory cgroup. Dirty pages, cached pages and
/// tables together leave room for the process, and for the kernel's page cache.
/// Method: random reads and writes of a file that is twice as long as the group's limit. The kernel would kill the
/// process.
#[test]
fn the_default_limit_fits_a_memory_group() {
    in_own_process("the_default_limit_fits_a_memory_group", Duration::from_secs(300), || {
        let group = match Group::enter() {
            Ok(group) => group,
            Err(reason) => return common::skip(format_args!("no memory cgroup: {reason}")),
        };
        let dir = temp_dir();
        let mut random = Random::from_environment();
        for mode in [WriteMode::Through, WriteMode::Back] {
            for backing in [Backing::Buffered, Backing::Direct] {
                let engine = Engine::builder().build().unwrap();
                assert_eq!(engine.cache_bytes(), GROUP_BYTES / 4);
                let path = dir.path().join("file");
                let options = read_write().write_mode(mode).backing(backing);
                let file = match engine.open(&path, &options) {
                    Ok(file) => file,
                    Err(error) => {
                        common::skip(format_args!("{backing:?}: {error}"));
                        continue;
                    }
                };
                let pages = FILE_BYTES / PAGE as u64;
                let mut versions = vec![0u8; pages as usize];
                file.truncate(FILE_BYTES).unwrap();
                for page in 0..pages {
                    file.write_all_at(&content(page, 0), page * PAGE as u64).unwrap();
                }
                let mut bytes = [0; PAGE];
                for _ in 0..scaled(10_000) {
                    let page = random.below(pages);
                    let version = &mut versions[page as usize];
                    if random.chance(300) {
                        *version = version.wrapping_add(1);
                        file.write_all_at(&content(page, *version), page * PAGE as u64).unwrap();
                    } else {
                        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
                        assert_eq!(bytes, content(page, *version), "{mode:?}, {backing:?}: {page}");
                    }
                }
                assert!(engine.stats().memory_bytes <= engine.cache_bytes());
                file.close().unwrap();
                fs::remove_file(&path).unwrap();
            }
        }
        drop(group);
    });
}
