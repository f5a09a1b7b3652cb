//! Opens a disk tier, and recovers its index after a restart (disk.T2, disk.T3).

use std::sync::Arc;

use crate::disk::directory_lock::{DirectoryInUse, DirectoryLock};
use crate::disk::index::Index;
use crate::disk::layout::{ALIGN_BYTES, HEAD_BYTES, Layout};
use crate::disk::owned::OwnedDirectory;
use crate::disk::shared::{DiskCounters, TierShared};
use crate::disk::writer::{CHUNK_BUFFERS_MIN, ChunkRing, Writer};
use crate::disk::{DiskOptions, DiskTier};
use millpond::direct::{DirectRequest, SegmentList};
use millpond::{AsyncFile, Buffer, Engine, File, OpenOptions};

/// Concurrent reads of headers. Untuned.
const HEADERS_IN_FLIGHT: usize = 32;
/// Share of the memory for chunk buffers: one part in so many. Untuned.
const CHUNK_BUFFERS_SHARE: u64 = 16;
const CHUNK_BUFFERS_BYTES_MAX: u64 = 32 << 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;

impl DiskOptions {
    pub(crate) fn layout(&self, page_bytes: u32) -> Result<Layout, String> {
        Layout::new(self.bytes, u64::from(page_bytes)).ok_or_else(|| {
            format!("a disk tier of {} bytes: too few for pages of {page_bytes}", self.bytes)
        })
    }

    /// Memory of a tier: its index, its chunk buffers, and one chunk to read back the next chunk to overwrite.
    pub(crate) fn tier_bytes(layout: &Layout, memory_bytes: u64) -> u64 {
        Index::bytes(layout) + (chunk_buffers(layout, memory_bytes) + 1) * layout.chunk_bytes()
    }
}

/// Number of chunk buffers.
fn chunk_buffers(layout: &Layout, memory_bytes: u64) -> u64 {
    let bytes = (memory_bytes / CHUNK_BUFFERS_SHARE).min(CHUNK_BUFFERS_BYTES_MAX);
    (bytes / layout.chunk_bytes()).max(CHUNK_BUFFERS_MIN)
}

impl DiskTier {
    pub(crate) fn open(
        options: &DiskOptions,
        (layout, memory_bytes): (Layout, u64),
        engine: &Engine,
        store: String,
    ) -> Result<DiskTier, Failure> {
        let dir = &options.dir;
        let failed = |what: &str, error: Failure| -> Failure {
            format!("the disk tier in {}: {what}: {error}", dir.display()).into()
        };
        let directory =
            OwnedDirectory::open(dir).map_err(|error| failed("the directory", error.into()))?;
        let lock = directory.open_file("lock");
        let lock = lock.map_err(|error| failed("its lock", error.into()))?;
        let lock =
            DirectoryLock::try_new(lock).map_err(|error| failed("its lock", error.into()))?;
        let lock = lock.ok_or_else(|| DirectoryInUse(dir.clone()))?;
        let file = directory.open_file("pages");
        let file = file.map_err(|error| failed("its file", error.into()))?;
        let direct = OpenOptions::new().read(true).write(true).direct(true);
        let file = engine.from_fd(file.into(), &direct);
        let file = file.map_err(|error| failed("opening its file for direct I/O", error.into()))?;
        let index = Index::new(&layout).map_err(|error| failed("its index", error.into()))?;
        let ring = recover(engine, &file, &layout, &index);
        let ring = ring.map_err(|error| failed("its file", error.into()))?;
        let chunk_buffers = engine.alloc_buffers(
            chunk_buffers(&layout, memory_bytes) as usize,
            layout.chunk_bytes() as usize,
        );
        let chunk_buffers = chunk_buffers.map_err(|error| failed("memory", error.into()))?;
        let (file, counts) = (AsyncFile::from(file), DiskCounters::default());
        let shared = Arc::new(TierShared { layout, index, file, counts, _lock: lock });
        let writer = Arc::new(Writer::new(chunk_buffers));
        let thread = std::thread::Builder::new().name("millpond-disk".into()).spawn({
            let (shared, writer) = (Arc::clone(&shared), Arc::clone(&writer));
            move || writer.run(&shared, ring)
        });
        let thread = Some(thread.map_err(|error| failed("its thread", error.into()))?);
        Ok(DiskTier { shared, writer, thread, process: std::process::id(), store })
    }
}

/// Fills the index from the chunk headers, and finds the oldest chunk.
fn recover(
    engine: &Engine,
    file: &File,
    layout: &Layout,
    index: &Index,
) -> millpond::Result<ChunkRing> {
    let spare = |bytes: usize| -> millpond::Result<Buffer> {
        Ok(engine.alloc_buffers(1, bytes)?.pop().expect("one was requested"))
    };
    let mut head = spare(ALIGN_BYTES as usize)?;
    // A head that can't be read counts as missing.
    let has_head = file.read_at(&mut head, 0).is_ok() && layout.is_head(&head);
    let len = file.len()?;
    let allowed = if has_head { layout.file_bytes() } else { 0 };
    if len > allowed {
        file.truncate(allowed)?;
    }
    let mut ring =
        ChunkRing { next: 0, sequence: 1, has_head, spare: spare(layout.chunk_bytes() as usize)? };
    let chunks = len.min(allowed).saturating_sub(HEAD_BYTES).div_ceil(layout.chunk_bytes()) as u32;
    let mut offsets = (0..chunks).map(|chunk| (chunk, layout.chunk_offset(chunk)));
    let mut buffers = engine.alloc_buffers(HEADERS_IN_FLIGHT, layout.header_bytes())?;
    let mut lanes = [0; HEADERS_IN_FLIGHT];
    engine.pipeline(HEADERS_IN_FLIGHT)?.run(|lane| {
        let its_chunk = &mut lanes[lane.number()];
        let ended = lane.into_ended();
        if let Some((request, Ok(moved))) = &ended
            && *moved == layout.header_bytes()
            && let Some(header) = request.slices().next()
            && let Some((sequence, entries)) = layout.read_header(header, *its_chunk)
        {
            index.insert(*its_chunk, &entries);
            if sequence >= ring.sequence {
                ring.sequence = sequence + 1;
                ring.next = (*its_chunk + 1) % layout.chunks;
            }
        }
        let offset;
        (*its_chunk, offset) = offsets.next()?;
        let mut request = match ended {
            Some((request, _)) => request,
            None => {
                let list = SegmentList::from_buffers(buffers.pop().into_iter().collect());
                DirectRequest::read(file, list, offset)
            }
        };
        request.set_offset(offset);
        Some(request)
    });
    Ok(ring)
}
