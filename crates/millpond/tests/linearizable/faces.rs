//! The same operations through the other APIs of a file: futures, a queue, a pipeline.

use std::future::Future;
use std::io::{IoSlice, IoSliceMut};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::{Context, Waker};

use millpond::direct::{DirectRequest, Pipeline, SegmentList};
use millpond::queue::{Completion, Queue, Request};
use millpond::{Advice, AsyncFile, Buffer, Engine, Error, File};

use crate::call::{act, content};
use crate::common::block_on;
use crate::history::{Op, Outcome};
use crate::plan::{Face, How, Step};

/// Alignment of a buffer's end if its memory and length must be aligned, so that a second one
/// follows.
const BLOCK_BYTES: usize = 512;

/// The parts of the API that a thread calls, besides its handles.
pub struct Faces<'e> {
    engine: &'e Engine,
    queue: Queue,
    pipeline: Pipeline,
}

/// An operation that has returned, and the bytes of its memory then.
pub struct Acted {
    pub step: Step,
    /// When it was invoked, and when it returned.
    pub when: (u64, u64),
    pub bytes: Vec<u8>,
    pub outcome: Result<Outcome, Error>,
}

/// The handles of a file.
pub struct Handles {
    pub all: Vec<Arc<File>>,
    /// A direct handle for pipelines, if the file system supports it.
    pub direct: Option<Arc<File>>,
}

/// The memory of an operation before it starts.
fn memory(step: &Step, cell_bytes: usize) -> Vec<u8> {
    match step.op {
        Op::Write { len, value, .. } | Op::Append { len, value } => content(value, len, cell_bytes),
        Op::Read { limit_bytes, .. } => vec![0xEE; limit_bytes],
        _ => Vec::new(),
    }
}

/// Asks a file.
pub fn act_alone(step: &Step, cell_bytes: usize, file: &Arc<File>, clock: &AtomicU64) -> Acted {
    // Prepared first, so that only the operation is between both readings of the clock.
    let mut bytes = memory(step, cell_bytes);
    let asynchronous = AsyncFile::from(Arc::clone(file));
    let invoked = clock.fetch_add(1, SeqCst);
    let outcome = match step.face {
        Face::Async => block_on(act_async(&asynchronous, step, cell_bytes, &mut bytes)),
        _ => act(file, step, cell_bytes, &mut bytes),
    };
    let returned = clock.fetch_add(1, SeqCst);
    Acted { step: *step, when: (invoked, returned), bytes, outcome }
}

impl<'e> Faces<'e> {
    /// With room for `depth` operations each.
    pub fn new(engine: &'e Engine, depth: usize) -> Faces<'e> {
        let (queue, pipeline) = (engine.queue(depth).unwrap(), engine.pipeline(depth).unwrap());
        Faces { engine, queue, pipeline }
    }

    /// Runs steps of one API; a queue and a pipeline have several in flight.
    pub fn act(
        &mut self,
        steps: &[Step],
        cell_bytes: usize,
        handles: &Handles,
        clock: &AtomicU64,
    ) -> Vec<Acted> {
        match (steps[0].face, &handles.direct) {
            (Face::Queue, _) => self.act_by_queue(steps, cell_bytes, handles, clock),
            (Face::Pipeline, Some(direct)) => {
                self.act_by_pipeline(steps, cell_bytes, direct, clock)
            }
            _ => steps
                .iter()
                .map(|step| act_alone(step, cell_bytes, &handles.all[step.handle], clock))
                .collect(),
        }
    }

    fn act_by_queue(
        &self,
        steps: &[Step],
        cell_bytes: usize,
        handles: &Handles,
        clock: &AtomicU64,
    ) -> Vec<Acted> {
        let request = |step: &Step| self.request(step, cell_bytes, &handles.all[step.handle]);
        let mut requests = steps.iter().map(request).zip(0..).collect::<Vec<_>>().into_iter();
        let (mut invoked, mut acted) = (Vec::new(), Vec::new());
        while acted.len() < steps.len() {
            // Some are in flight together, some start when the one before has ended.
            for (request, number) in requests.by_ref() {
                invoked.push(clock.fetch_add(1, SeqCst));
                let mut one = vec![request.user_data(number)];
                self.queue.submit_all(one.drain(..)).unwrap();
                if steps[number as usize].spins % 4 == 1 {
                    break;
                }
            }
            for done in self.queue.wait(1, self.queue.capacity(), None).unwrap() {
                let returned = clock.fetch_add(1, SeqCst);
                let number = done.user_data() as usize;
                let (step, when) = (steps[number], (invoked[number], returned));
                let (moved, bytes) = parts(done, step.how == How::Vectored);
                let outcome = moved.map(|moved| outcome(&step, moved, cell_bytes));
                acted.push(Acted { step, when, bytes, outcome });
            }
        }
        acted
    }

    fn request(&self, step: &Step, cell_bytes: usize, file: &Arc<File>) -> Request {
        let bytes = memory(step, cell_bytes);
        match (step.op, step.how) {
            (Op::Read { at, .. }, How::Vectored) => {
                Request::read_buffers(file, self.buffers(&bytes, 1), (at * cell_bytes) as u64)
            }
            (Op::Write { at, .. }, How::Vectored) => {
                Request::write_buffers(file, self.buffers(&bytes, 1), (at * cell_bytes) as u64)
            }
            (Op::Read { at, .. }, _) => Request::read(file, bytes, (at * cell_bytes) as u64),
            (Op::Write { at, .. }, _) => Request::write(file, bytes, (at * cell_bytes) as u64),
            (_, How::Sync) if step.spins.is_multiple_of(2) => Request::sync_all(file),
            (_, How::Sync) => Request::sync_data(file),
            (op, how) => panic!("{op:?}, {how:?}: nothing for a queue"),
        }
    }

    /// Several buffers with these bytes, if their length is a multiple of `block_bytes`.
    fn buffers(&self, bytes: &[u8], block_bytes: usize) -> Vec<Buffer> {
        let cut = bytes.len() / 3 / block_bytes * block_bytes;
        let (head, tail) = bytes.split_at(cut);
        let some = |piece: &&[u8]| !piece.is_empty();
        let buffer = |piece: &[u8]| {
            let mut buffer = self.engine.alloc_buffers(1, piece.len()).unwrap().remove(0);
            buffer.copy_from_slice(piece);
            buffer
        };
        [head, tail].into_iter().filter(some).map(buffer).collect()
    }

    fn act_by_pipeline(
        &mut self,
        steps: &[Step],
        cell_bytes: usize,
        direct: &File,
        clock: &AtomicU64,
    ) -> Vec<Acted> {
        let request = |step: &Step| {
            let bytes = memory(step, cell_bytes);
            // All in one, or not.
            let block_bytes = if step.how == How::Vectored { BLOCK_BYTES } else { usize::MAX };
            let list = SegmentList::from_buffers(self.buffers(&bytes, block_bytes));
            match step.op {
                Op::Read { at, .. } => DirectRequest::read(direct, list, (at * cell_bytes) as u64),
                Op::Write { at, .. } => {
                    DirectRequest::write(direct, list, (at * cell_bytes) as u64)
                        .durable(step.how == How::Dsync)
                }
                op => panic!("{op:?}: nothing for a pipeline"),
            }
        };
        let mut requests = steps.iter().map(request).collect::<Vec<_>>().into_iter().enumerate();
        let (mut lanes, mut acted) = (vec![(0, 0); steps.len()], Vec::new());
        self.pipeline.run(|lane| {
            let lane_number = lane.number();
            if let Some((request, moved)) = lane.into_ended() {
                let (number, invoked) = lanes[lane_number];
                let (step, when) = (steps[number], (invoked, clock.fetch_add(1, SeqCst)));
                let bytes = request.slices().flatten().copied().collect();
                let outcome = moved.map(|moved| outcome(&step, moved, cell_bytes));
                acted.push(Acted { step, when, bytes, outcome });
            }
            requests.next().map(|(number, request)| {
                lanes[lane_number] = (number, clock.fetch_add(1, SeqCst));
                request
            })
        });
        acted
    }
}

fn parts(done: Completion, are_buffers: bool) -> (Result<usize, Error>, Vec<u8>) {
    match (are_buffers, done.result()) {
        (true, Ok(moved)) => {
            let buffers = done.into_buffers();
            (Ok(moved), buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect())
        }
        _ => done.into_parts(),
    }
}

/// The outcome that a number of transferred bytes stands for.
fn outcome(step: &Step, moved: usize, cell_bytes: usize) -> Outcome {
    match step.op {
        Op::Read { .. } => Outcome::Read { bytes: moved, cells: Vec::new() },
        Op::Write { at, .. } => Outcome::Wrote { at: at * cell_bytes, bytes: moved },
        _ => Outcome::Done,
    }
}

/// As [`act`], by futures. Before some reads there is one that is dropped where it waits.
async fn act_async(
    file: &AsyncFile,
    step: &Step,
    cell_bytes: usize,
    bytes: &mut [u8],
) -> Result<Outcome, Error> {
    let offset = |at: usize| (at * cell_bytes) as u64;
    let cut = bytes.len() / 3;
    let moved = |moved: usize| outcome(step, moved, cell_bytes);
    if let (Op::Read { at, .. }, 1) = (step.op, step.spins % 3) {
        let _ = pin!(file.read_at(bytes, offset(at))).poll(&mut Context::from_waker(Waker::noop()));
        bytes.fill(0xEE);
    }
    match (step.op, step.how) {
        (Op::Read { at, len, .. }, How::View) => {
            let view = file.view(offset(at), len * cell_bytes).await?;
            bytes[..view.len()].copy_from_slice(&view);
            Ok(moved(view.len()))
        }
        (Op::Read { at, .. }, how) => {
            let (head, tail) = bytes.split_at_mut(cut);
            let mut slices = [IoSliceMut::new(head), IoSliceMut::new(tail)];
            let read = match how {
                How::Vectored => file.read_vectored_at(&mut slices, offset(at)).await,
                _ => file.read_at(bytes, offset(at)).await,
            };
            match read {
                // A direct handle has other forms of these reads.
                Err(Error::InvalidInput { .. }) => act(file.file(), step, cell_bytes, bytes),
                read => read.map(moved),
            }
        }
        (Op::Write { at, .. }, How::Vectored) => {
            let slices = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            file.write_vectored_at(&slices, offset(at)).await.map(moved)
        }
        (Op::Write { at, .. }, How::Dsync) => {
            file.write_at_dsync(bytes, offset(at)).await.map(moved)
        }
        (Op::Write { at, .. }, _) => file.write_at(bytes, offset(at)).await.map(moved),
        (Op::Append { .. }, how) => {
            let cut = if how == How::Vectored { cut } else { 0 };
            let slices = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            match file.append_vectored(&slices).await {
                Err(Error::Io { offset, len, ref source, .. })
                    if source.kind() == std::io::ErrorKind::WriteZero =>
                {
                    Ok(Outcome::Wrote { at: offset as usize, bytes: len as usize })
                }
                end => end.map(|at| Outcome::Wrote { at: at as usize, bytes: bytes.len() }),
            }
        }
        (op, how) => change(file, op, how, offset).await.map(|()| Outcome::Done),
    }
}

/// Runs an operation that transfers no bytes.
async fn change(
    file: &AsyncFile,
    op: Op,
    how: How,
    offset: impl Fn(usize) -> u64,
) -> Result<(), Error> {
    match (op, how) {
        (Op::Truncate { len }, _) => file.truncate(offset(len)).await,
        (Op::Clear { at, len }, How::Zero) => file.zero_range(offset(at), offset(len)).await,
        (Op::Clear { at, len }, _) => file.punch_hole(offset(at), offset(len)).await,
        (Op::Allocate { at, len }, _) => file.allocate(offset(at), offset(len)).await,
        (_, How::WriteBack) => file.write_back().await,
        (_, How::Sync) => file.sync_data().await,
        (_, How::DontNeed) => file.advise(0, 0, Advice::DontNeed),
        (_, How::WillNeed) => file.advise(0, 0, Advice::WillNeed),
        _ => file.invalidate(0, 1 << 20).await,
    }
}
