//! Finds the program to run and checks whether a preload library can reach it.
//!
//! The dynamic loader implements `LD_PRELOAD`. A static program has no loader. A loader ignores
//! the library in a program that gains privileges, and can't load it into a program of another
//! architecture or C library. Each of these programs would run *unserved and silently*, so it is refused.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags};

use crate::failure::{Failure, NOT_EXECUTABLE, NOT_FOUND, REFUSED, Result};

/// The directories that execvp searches if PATH is not set.
const PATH_DEFAULT: &str = "/bin:/usr/bin";
/// Maximum length of a chain of scripts that are interpreters; the kernel's limit.
const SCRIPT_DEPTH_MAX: usize = 5;
/// Bytes of a file that the kernel reads to find its interpreter (BINPRM_BUF_SIZE).
const SCRIPT_LINE_BYTES_MAX: usize = 256;

/// The file that `execvp(name)` would execute.
pub fn find(name: &OsStr) -> Result<PathBuf> {
    find_in(&env::var_os("PATH").unwrap_or_else(|| PATH_DEFAULT.into()), name)
}

fn find_in(search: &OsStr, name: &OsStr) -> Result<PathBuf> {
    if name.is_empty() {
        return Err(Failure::new(NOT_FOUND, "the program's name is empty"));
    }
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(error) => Err(cannot_start(&path, &error)),
        };
    }
    let mut denied = None;
    for directory in env::split_paths(search) {
        // An empty entry of PATH is the current directory.
        let path = Path::new(".").join(directory).join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            // Continues the search, as execvp does, and remembers that a file was found.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                denied.get_or_insert((path, error));
            }
            Err(_) => {}
        }
    }
    Err(match denied {
        Some((path, error)) => cannot_start(&path, &error),
        None => Failure::new(NOT_FOUND, format!("{}: not found", name.display())),
    })
}

fn executable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    Ok(rustix::fs::access(path, Access::EXEC_OK)?)
}

fn cannot_start(path: &Path, error: &io::Error) -> Failure {
    let missing = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    let status = if missing { NOT_FOUND } else { NOT_EXECUTABLE };
    Failure::new(status, format!("{}: {error}", path.display()))
}

/// Refuses a program that can't load the preload library.
pub fn check(path: &Path) -> Result<()> {
    let mut current = path.to_owned();
    for _ in 0..SCRIPT_DEPTH_MAX {
        let refuse = |why: String| {
            let role = if current == path {
                String::new()
            } else {
                format!(" (interpreter of {})", path.display())
            };
            Failure::new(REFUSED, format!("{}{role}: {why}", current.display()))
        };
        let file = match File::open(&current) {
            Ok(file) => file,
            // It can be executed but not read, so it might run unserved without a message.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(refuse(
                    "can't be read, so Millpond can't check whether it can serve it".into(),
                ));
            }
            // The interpreter is missing; the script is executable.
            Err(error) => return Err(Failure { status: NOT_FOUND, ..refuse(error.to_string()) }),
        };
        let metadata = file.metadata().map_err(|error| refuse(error.to_string()))?;
        let kind = Kind::of(&file).map_err(|error| refuse(error.to_string()))?;
        if !matches!(kind, Kind::Script { .. } | Kind::Unknown)
            && let Some(how) = privileges(&current, &metadata)
        {
            return Err(refuse(format!(
                "{how}; the dynamic loader ignores preload libraries in such a program, so \
                 Millpond can't serve it"
            )));
        }
        match kind {
            Kind::Script { interpreter } => current = interpreter,
            Kind::Dynamic { machine, interpreter } => {
                return check_loader(machine, &interpreter).map_err(refuse);
            }
            Kind::Static { .. } => {
                return Err(refuse(
                    "is statically linked; Millpond serves programs through the dynamic loader \
                     and can't serve this one (link it dynamically, or use the Rust library)"
                        .into(),
                ));
            }
            // exec decides: a script without #! is run by /bin/sh.
            Kind::Unknown => return Ok(()),
        }
    }
    Ok(())
}

/// Why the dynamic loader would treat the program as privileged (AT_SECURE), if it would.
fn privileges(path: &Path, metadata: &Metadata) -> Option<&'static str> {
    let uid = rustix::process::getuid();
    let no_setuid = rustix::fs::statvfs(path)
        .is_ok_and(|statvfs| statvfs.f_flag.contains(StatVfsMountFlags::NOSUID));
    if no_setuid {
        return None;
    }
    let mode = metadata.permissions().mode();
    if mode & 0o4000 != 0 && metadata.uid() != uid.as_raw() {
        return Some("is setuid");
    }
    // Without group execution the bit means mandatory locking, not privilege.
    if mode & 0o2010 == 0o2010 && metadata.gid() != rustix::process::getgid().as_raw() {
        return Some("is setgid");
    }
    let mut value = [0_u8; 64];
    let capable = rustix::fs::getxattr(path, "security.capability", &mut value).is_ok();
    (capable && !uid.is_root()).then_some("has file capabilities")
}

/// Whether the program's loader can load a library built like this binary.
fn check_loader(machine: Machine, interpreter: &OsStr) -> std::result::Result<(), String> {
    let own = File::open("/proc/self/exe").and_then(|file| Kind::of(&file));
    let own_machine = match &own {
        Ok(Kind::Dynamic { machine, .. } | Kind::Static { machine }) => *machine,
        _ => return Ok(()),
    };
    if machine != own_machine {
        return Err(format!("is a program for {machine}; this Millpond serves {own_machine}"));
    }
    let musl = |loader: &OsStr| {
        Path::new(loader).file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-musl"))
    };
    let own_musl = cfg!(target_env = "musl");
    if musl(interpreter) != own_musl {
        let name = |musl: bool| if musl { "musl" } else { "another C library than musl" };
        return Err(format!(
            "is linked against {}; this Millpond is built for {}",
            name(!own_musl),
            name(own_musl)
        ));
    }
    Ok(())
}

/// Architecture and word size, from the ELF header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Machine {
    bits: u8,
    little_endian: bool,
    number: u16,
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self.number {
            3 => "x86",
            40 => "ARM",
            62 => "x86-64",
            183 => "AArch64",
            243 => "RISC-V",
            number => return write!(f, "ELF machine {number} ({} bits)", self.bits),
        };
        write!(f, "{name} ({} bits)", self.bits)
    }
}

/// How the kernel executes a file.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// An ELF file with a dynamic loader.
    Dynamic { machine: Machine, interpreter: OsString },
    /// An ELF file without one.
    Static { machine: Machine },
    /// Starts with `#!`.
    Script { interpreter: PathBuf },
    /// Any other format.
    Unknown,
}

const PT_INTERP: u64 = 3;

impl Kind {
    fn of(file: &File) -> io::Result<Self> {
        let mut head = vec![0; SCRIPT_LINE_BYTES_MAX];
        let len = read_up_to(file, &mut head, 0)?;
        head.truncate(len);
        if head.starts_with(b"#!") {
            return Ok(Self::of_script(&head));
        }
        if head.starts_with(b"\x7fELF") {
            return Ok(Self::of_elf(file, &head).unwrap_or(Kind::Unknown));
        }
        Ok(Kind::Unknown)
    }

    fn of_script(head: &[u8]) -> Self {
        let line = head[2..].split(|byte| *byte == b'\n').next().unwrap_or_default();
        let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | 0));
        match words.find(|word| !word.is_empty()) {
            Some(word) => {
                Kind::Script { interpreter: PathBuf::from(OsString::from_vec(word.to_vec())) }
            }
            None => Kind::Unknown,
        }
    }

    /// `None` if the header is invalid.
    fn of_elf(file: &File, head: &[u8]) -> Option<Self> {
        let little_endian = *head.get(5)? == 1;
        let bits = if *head.get(4)? == 2 { 64 } else { 32 };
        let elf = Elf { little_endian };
        let machine = Machine { bits, little_endian, number: elf.uint(head, 18, 2)? as u16 };
        // Offsets of e_phoff, e_phentsize and e_phnum; then, in a program header, of p_offset and
        // p_filesz. elf(5) has the structures.
        let (phoff, phentsize, phnum, p_offset, p_filesz, word) = match bits {
            64 => (32, 54, 56, 8, 32, 8),
            _ => (28, 42, 44, 4, 16, 4),
        };
        let table = elf.uint(head, phoff, word)?;
        let entry_bytes = elf.uint(head, phentsize, 2)?;
        for index in 0..elf.uint(head, phnum, 2)? {
            let mut entry = [0; 56];
            let offset = table.checked_add(index * entry_bytes)?;
            read_up_to(file, &mut entry, offset).ok()?;
            if elf.uint(&entry, 0, 4)? != PT_INTERP {
                continue;
            }
            let len = elf.uint(&entry, p_filesz, word)?.min(4096) as usize;
            let mut interpreter = vec![0; len];
            read_up_to(file, &mut interpreter, elf.uint(&entry, p_offset, word)?).ok()?;
            interpreter.truncate(interpreter.iter().position(|byte| *byte == 0).unwrap_or(len));
            let interpreter = OsString::from_vec(interpreter);
            return Some(Kind::Dynamic { machine, interpreter });
        }
        Some(Kind::Static { machine })
    }
}

/// Reads the integers of an ELF file.
struct Elf {
    little_endian: bool,
}

impl Elf {
    fn uint(&self, bytes: &[u8], offset: usize, len: usize) -> Option<u64> {
        let field = bytes.get(offset..offset + len)?;
        let shift = |sum: u64, byte: &u8| (sum << 8) | u64::from(*byte);
        Some(match self.little_endian {
            true => field.iter().rev().fold(0, shift),
            false => field.iter().fold(0, shift),
        })
    }
}

/// Reads at `offset` until `dst` is full or the file ends.
fn read_up_to(file: &File, dst: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < dst.len() {
        match file.read_at(&mut dst[done..], offset.saturating_add(done as u64))? {
            0 => break,
            len => done += len,
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// An ELF header without program headers: a static program.
    fn static_elf(number: u16) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        bytes[18..20].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    #[test]
    fn kinds_are_told_apart() {
        let own = Kind::of(&File::open("/proc/self/exe").unwrap()).unwrap();
        assert!(matches!(own, Kind::Dynamic { .. }), "{own:?}");
        let machine = Machine { bits: 64, little_endian: true, number: 183 };
        assert_eq!(Kind::of(&file_of(&static_elf(183))).unwrap(), Kind::Static { machine });
        assert_eq!(Kind::of(&file_of(b"echo hello\n")).unwrap(), Kind::Unknown);
        assert_eq!(Kind::of(&file_of(b"")).unwrap(), Kind::Unknown);
        assert_eq!(Kind::of(&file_of(b"\x7fELF")).unwrap(), Kind::Unknown);
    }

    #[test]
    fn script_lines_name_their_interpreter() {
        for line in ["#!/bin/sh", "#!/bin/sh\n", "#! \t/bin/sh -e\nmore", "#!/bin/sh\t\n"] {
            let kind = Kind::of(&file_of(line.as_bytes())).unwrap();
            assert_eq!(kind, Kind::Script { interpreter: "/bin/sh".into() }, "{line:?}");
        }
        assert_eq!(Kind::of(&file_of(b"#!\n/bin/sh")).unwrap(), Kind::Unknown);
    }

    #[test]
    fn other_machines_are_refused() {
        let machine = Machine { bits: 64, little_endian: true, number: 0xfff0 };
        assert!(check_loader(machine, OsStr::new("/lib64/ld.so")).is_err());
    }

    #[test]
    fn programs_are_found_as_execvp_finds_them() {
        let find = |name| find_in(OsStr::new("/no/such:/usr/bin:/bin"), name);
        assert!(find(OsStr::new("sh")).unwrap().ends_with("sh"));
        assert_eq!(find(OsStr::new("no-such-program")).unwrap_err().status, NOT_FOUND);
        assert_eq!(find(OsStr::new("/no/such/program")).unwrap_err().status, NOT_FOUND);
        assert_eq!(find(OsStr::new("/etc/passwd")).unwrap_err().status, NOT_EXECUTABLE);
        assert_eq!(find(OsStr::new("/etc")).unwrap_err().status, NOT_EXECUTABLE);
        assert_eq!(find(OsStr::new("")).unwrap_err().status, NOT_FOUND);
    }
}
