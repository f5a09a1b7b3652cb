//! A disk with a volatile cache, as a file: a power cut can lose the writes since the last flush.
//!
//! The disk is the one file of a FUSE file system, and a loop device lies over it, so a file system
//! can be made and mounted there. A write reaches the recorder before the loop device completes it,
//! and goes to the volatile cache. The loop device flushes by `fsync`, which makes the volatile
//! cache durable. On a block device without FUA the kernel's block layer sends a flush after each
//! FUA write. So the recorder sees the same requests as a disk.
//!
//! ```text
//! file system -> loop device -> FUSE -> recorder: volatile -> (FSYNC) -> durable
//! ```
//!
//! The recorder is a separate process of this test binary. A thread that waits in the kernel for
//! its disk can't be killed; in the process that serves that disk, it would prevent the process
//! from ending. The recorder ends when its control socket is closed.
//!
//! Structures are as in Linux's `include/uapi/linux/fuse.h`.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Of the recorder's process: where its image, socket and mount point are.
pub const ROLE: &str = "MILLPOND_TEST_RECORDER";

/// Names in that directory.
pub const IMAGE: &str = "image";
pub const CONTROL: &str = "control";
pub const DEVICE: &str = "device";

/// The unit that a device loses or stores as a whole.
const SECTOR_BYTES: usize = 512;
/// The unit of the record of blocks that were ever written.
const BLOCK_BYTES: usize = 4096;
const WRITE_BYTES_MAX: usize = 1 << 20;

/// SplitMix64 (Steele et al., OOPSLA 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % below
    }

    fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

struct Disk {
    durable: Vec<u8>,
    current: Vec<u8>,
    /// Writes since the last flush, in their order.
    volatile: Vec<(usize, Vec<u8>)>,
    /// Whether writes and flushes fail.
    fails: bool,
    /// Whether each block was ever written.
    used: Vec<bool>,
}

impl Disk {
    fn of(image: Vec<u8>) -> Disk {
        let used = image.chunks(BLOCK_BYTES).map(|block| block != [0; BLOCK_BYTES]).collect();
        Disk { durable: image.clone(), current: image, volatile: Vec::new(), fails: false, used }
    }

    fn write(&mut self, offset: usize, bytes: Vec<u8>) {
        let blocks = offset / BLOCK_BYTES..(offset + bytes.len()).div_ceil(BLOCK_BYTES);
        self.used[blocks].fill(true);
        self.current[offset..offset + bytes.len()].copy_from_slice(&bytes);
        self.volatile.push((offset, bytes));
    }

    fn flush(&mut self) {
        for (offset, bytes) in self.volatile.drain(..) {
            self.durable[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// Writes the contents after a power cut: the flushed sectors, and by `seed` a random part of
    /// the others.
    fn cut(&self, image: &fs::File, seed: Option<u64>) -> io::Result<()> {
        image.set_len(self.durable.len() as u64)?;
        // Most of a small file system was never written.
        let used = self.used.iter().enumerate().filter(|(_, is_used)| **is_used);
        for offset in used.map(|(block, _)| block * BLOCK_BYTES) {
            image.write_all_at(&self.durable[offset..offset + BLOCK_BYTES], offset as u64)?;
        }
        let Some(seed) = seed else { return Ok(()) };
        let mut random = Random(seed);
        // The lost part varies from nearly nothing to nearly all.
        let kept_per_mille = random.below(1001);
        for (offset, bytes) in &self.volatile {
            let is_torn = random.chance(100);
            let is_kept = random.chance(kept_per_mille);
            for (at, sector) in (*offset..).step_by(SECTOR_BYTES).zip(bytes.chunks(SECTOR_BYTES)) {
                if if is_torn { random.chance(500) } else { is_kept } {
                    image.write_all_at(sector, at as u64)?;
                }
            }
        }
        Ok(())
    }
}

/// The recorder's process: serves until the control socket ends, and does not return.
pub fn run() {
    let dir = std::env::var_os(ROLE).expect("started by `Disk::start`");
    let dir = Path::new(&dir);
    let control = UnixStream::connect(dir.join(CONTROL)).unwrap();
    let image = fs::read(dir.join(IMAGE)).unwrap();
    let disk = Arc::new(Mutex::new(Disk::of(image)));
    let device = mount(&dir.join(DEVICE)).unwrap();
    std::thread::spawn({
        let disk = Arc::clone(&disk);
        move || serve(&device, &disk)
    });
    obey(control, &disk);
    std::process::exit(0);
}

/// Executes lines of the control socket, each answered when it is done: `cut PATH [SEED]` makes an
/// image of the contents after a power cut; `fail` makes the disk fail from then on.
fn obey(control: UnixStream, disk: &Mutex<Disk>) {
    let mut answers = control.try_clone().unwrap();
    answers.write_all(b"ready\n").unwrap();
    for line in BufReader::new(control).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["fail"] => disk.lock().unwrap().fails = true,
            ["cut", path] => cut(disk, path, None),
            ["cut", path, seed] => cut(disk, path, Some(seed.parse().unwrap())),
            _ => panic!("the recorder does not know: {line}"),
        }
        answers.write_all(b"done\n").unwrap();
    }
}

fn cut(disk: &Mutex<Disk>, path: &str, seed: Option<u64>) {
    let image = fs::File::create(path).unwrap();
    disk.lock().unwrap().cut(&image, seed).unwrap();
}

/// Mounts a file system that has one file, its root, on the file `path`.
fn mount(path: &Path) -> io::Result<fs::File> {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let options = format!("fd={},rootmode=100600,user_id=0,group_id=0\0", device.as_raw_fd());
    let target = format!("{}\0", path.display());
    // SAFETY: all four strings end with a zero byte and outlive the call.
    let result = unsafe {
        libc::mount(
            c"recorder".as_ptr(),
            target.as_ptr().cast(),
            c"fuse".as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV,
            options.as_ptr().cast(),
        )
    };
    if result != 0 { Err(io::Error::last_os_error()) } else { Ok(device) }
}

const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const FALLOCATE: u32 = 43;

const IN_HEADER_BYTES: usize = 40;
/// `fuse_read_in`, `fuse_write_in`.
const TRANSFER_IN_BYTES: usize = 40;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn serve(mut device: &fs::File, disk: &Mutex<Disk>) {
    let mut request = vec![0; WRITE_BYTES_MAX + 8192];
    loop {
        let len = match device.read(&mut request) {
            Ok(len) => len,
            // ENODEV: unmounted. ENOENT: the request was interrupted before it was read.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => panic!("/dev/fuse: {error}"),
        };
        let (header, body) = request[..len].split_at(IN_HEADER_BYTES);
        let (opcode, unique) = (u32_at(header, 4), u64_at(header, 8));
        if opcode == FORGET || opcode == INTERRUPT {
            continue;
        }
        let (error, answer) = match answer(opcode, body, &mut disk.lock().unwrap()) {
            Ok(answer) => (0, answer),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut reply = Vec::with_capacity(16 + answer.len());
        reply.extend_from_slice(&(16 + answer.len() as u32).to_ne_bytes());
        reply.extend_from_slice(&error.to_ne_bytes());
        reply.extend_from_slice(&unique.to_ne_bytes());
        reply.extend_from_slice(&answer);
        // ENOENT: the request's caller was interrupted.
        let _ = device.write(&reply);
    }
}

/// A structure of 32-bit words, `bytes` long.
fn words(bytes: usize, at: &[(usize, u32)]) -> Vec<u8> {
    let mut answer = vec![0; bytes];
    at.iter().for_each(|(at, word)| answer[*at..at + 4].copy_from_slice(&word.to_ne_bytes()));
    answer
}

fn answer(opcode: u32, body: &[u8], disk: &mut Disk) -> Result<Vec<u8>, i32> {
    match opcode {
        WRITE | FSYNC | FALLOCATE if disk.fails => Err(libc::EIO),
        INIT => {
            // max_write is above 128 KiB with FUSE_MAX_PAGES alone.
            const BIG_WRITES: u32 = 1 << 5;
            const MAX_PAGES: u32 = 1 << 22;
            let (background, pages) = (16 | 12 << 16, (WRITE_BYTES_MAX / 4096) as u32);
            Ok(words(
                64,
                &[
                    (0, 7),
                    (4, 31),
                    (8, 1 << 17),
                    (12, u32_at(body, 12) & (BIG_WRITES | MAX_PAGES)),
                    (16, background),
                    (20, WRITE_BYTES_MAX as u32),
                    (24, 1),
                    (28, pages),
                ],
            ))
        }
        GETATTR | SETATTR => {
            let size = disk.current.len() as u64;
            let mut answer =
                words(104, &[(0, 3600), (76, libc::S_IFREG | 0o600), (80, 1), (96, 4096)]);
            answer[16..24].copy_from_slice(&1u64.to_ne_bytes());
            answer[24..32].copy_from_slice(&size.to_ne_bytes());
            answer[32..40].copy_from_slice(&(size / 512).to_ne_bytes());
            Ok(answer)
        }
        OPEN => Ok(vec![0; 16]),
        READ => {
            let (offset, len) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
            let end = (offset + len).min(disk.current.len());
            Ok(disk.current[offset.min(end)..end].to_vec())
        }
        WRITE => {
            let (offset, len) = (u64_at(body, 8) as usize, u32_at(body, 16));
            let bytes = body[TRANSFER_IN_BYTES..][..len as usize].to_vec();
            if offset + bytes.len() > disk.current.len() {
                return Err(libc::ENOSPC);
            }
            disk.write(offset, bytes);
            Ok(words(8, &[(0, len)]))
        }
        FSYNC => {
            disk.flush();
            Ok(Vec::new())
        }
        FALLOCATE => {
            // Zeros, as a punched or zeroed range reads.
            let (offset, len) = (u64_at(body, 8) as usize, u64_at(body, 16) as usize);
            let mode = u32_at(body, 24) as i32;
            let zeroes = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
            if mode & zeroes == 0 || offset + len > disk.current.len() {
                return Err(libc::EOPNOTSUPP);
            }
            disk.write(offset, vec![0; len]);
            Ok(Vec::new())
        }
        FLUSH | RELEASE => Ok(Vec::new()),
        _ => Err(libc::ENOSYS),
    }
}
