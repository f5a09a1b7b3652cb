//! Loom models of a thread that reads, and of another that cancels it, compiled by `tests/loom.rs`.
//! In the end the thread has acted on the request, or has no hits, so that its next read reaches a
//! point. The `loom_cancel_without_*` twins leave one rule out and must fail.

use loom::sync::Arc;
use loom::thread;

use super::*;

const THREAD: usize = 7;

struct Model {
    record: CancelRequest,
    mark: Mark,
    /// Libc's word.
    pending: AtomicBool,
}

impl Model {
    fn new() -> Arc<Model> {
        let record = CancelRequest {
            thread: AtomicUsize::new(0),
            warm: AtomicBool::new(false),
            asked: AtomicBool::new(false),
        };
        Arc::new(Model { record, mark: AtomicBool::new(false), pending: AtomicBool::new(false) })
    }

    fn cancel(&self) {
        self.pending.store(true, Relaxed);
        fence(SeqCst);
        let ask = || {
            let is_found = self.record.is_of(THREAD);
            if is_found {
                self.record.request_cancel();
            }
            is_found
        };
        ask_until_found(ask, &self.mark);
    }

    /// Whether it has acted.
    fn point(&self, settle: fn(&CancelRequest, &dyn Fn() -> bool)) -> bool {
        let acted = std::cell::Cell::new(false);
        let look = || {
            acted.set(acted.get() | self.pending.load(Relaxed));
            true
        };
        if self.record.is_asked() {
            settle(&self.record, &look);
        } else {
            look();
        }
        acted.get()
    }
}

fn settle(record: &CancelRequest, look: &dyn Fn() -> bool) {
    record.act(look);
}

/// The rules that a twin leaves out are replaced.
struct Rules {
    claim: fn(&Model),
    warm_up: fn(&CancelRequest),
    settle: fn(&CancelRequest, &dyn Fn() -> bool),
}

const RULES: Rules = Rules {
    claim: |model| model.record.claim(THREAD, &model.mark),
    warm_up: CancelRequest::warm_up,
    settle,
};

/// The thread reads twice, slowly, and would go on with hits.
fn explore(rules: Rules) {
    let rules = std::sync::Arc::new(rules);
    loom::model(move || {
        let model = Model::new();
        let reader = thread::spawn({
            let (model, rules) = (Arc::clone(&model), std::sync::Arc::clone(&rules));
            move || {
                (rules.claim)(&model);
                for _ in 0..2 {
                    if model.record.is_warm() {
                        continue;
                    }
                    if model.point(rules.settle) {
                        return true;
                    }
                    (rules.warm_up)(&model.record);
                }
                false
            }
        });
        model.cancel();
        let has_acted = reader.join().unwrap();
        assert!(has_acted || !model.record.is_warm(), "hits for ever");
    });
}

/// Goal: no request is lost, in any order of the two threads' steps.
#[test]
fn loom_cancel_ends_hits() {
    explore(RULES);
}

/// Goal: a request that meets disabled cancellation is pending until cancellation is enabled.
#[test]
fn loom_cancel_waits_while_disabled() {
    loom::model(|| {
        let model = Model::new();
        model.record.claim(THREAD, &model.mark);
        let other = thread::spawn({
            let model = Arc::clone(&model);
            move || model.cancel()
        });
        if model.record.is_asked() {
            model.record.act(|| false);
        }
        model.record.warm_up();
        other.join().unwrap();
        assert!(model.record.is_asked() && !model.record.is_warm(), "forgotten");
    });
}

/// Q1.
#[test]
#[should_panic(expected = "hits for ever")]
fn loom_cancel_without_a_look_after_warming_up() {
    explore(Rules { warm_up: |record| record.warm.store(true, Relaxed), ..RULES });
}

/// Q2.
#[test]
#[should_panic(expected = "hits for ever")]
fn loom_cancel_without_forgetting_first() {
    explore(Rules {
        settle: |record, look| {
            look();
            record.asked.store(false, Relaxed);
        },
        ..RULES
    });
}

/// Q3.
#[test]
#[should_panic(expected = "hits for ever")]
fn loom_cancel_without_a_look_for_the_mark() {
    explore(Rules { claim: |model| model.record.thread.store(THREAD, Relaxed), ..RULES });
}

/// Q3: the mark is seen, or the thread is.
#[test]
#[should_panic(expected = "hits for ever")]
fn loom_cancel_without_the_fence_of_claim() {
    explore(Rules {
        claim: |model| {
            model.record.thread.store(THREAD, Relaxed);
            if model.mark.load(Relaxed) {
                model.record.request_cancel();
            }
        },
        ..RULES
    });
}
