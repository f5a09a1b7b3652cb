//! Loom models of the places of contexts, compiled by `tests/loom.rs`: found, used, destroyed and
//! freed at the same time. The `loom_places_without_*` twins leave one rule out and must fail.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::sync::atomic::Ordering;

use super::*;

const HANDLE: usize = 1;
const OTHER: usize = 2;

/// Whether a context was freed. Loom reports an access that is concurrent with the free, or not
/// ordered after it.
type Freed = Arc<UnsafeCell<bool>>;

struct Context {
    handle: usize,
    freed: Freed,
}

// SAFETY: loom checks the accesses to the cell.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: loom checks it.
        self.freed.with_mut(|freed| unsafe { *freed = true });
    }
}

type Model = Places<Context, 2>;

/// With one context.
fn model() -> (Arc<Model>, Freed) {
    let place = || Place {
        handle: AtomicUsize::new(0),
        users: AtomicU32::new(0),
        context: AtomicPtr::new(null_mut()),
    };
    let places = std::array::from_fn(|_| place());
    let places = Places { places, used: AtomicUsize::new(0), making: Lock::new(()) };
    let freed = Arc::new(UnsafeCell::new(false));
    let context = Context { handle: HANDLE, freed: Arc::clone(&freed) };
    assert_eq!(places.place(HANDLE, context), Some(HANDLE));
    (Arc::new(places), freed)
}

fn explore(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(body);
}

fn spawn<R: 'static>(
    places: &Arc<Model>,
    body: impl FnOnce(&Model) -> R + 'static,
) -> thread::JoinHandle<R> {
    let places = Arc::clone(places);
    thread::spawn(move || body(&places))
}

/// As `aio::destroy`; whether this thread did it.
fn destroy(places: &Model, handle: usize) -> bool {
    let Some(context) = places.find(handle) else { return false };
    let removed = context.remove(handle);
    drop(context);
    places.free_removed();
    removed
}

fn find(places: &Model) -> Option<InUse<'_, Context>> {
    places.find(HANDLE)
}

/// Records a use: not through the context, as a twin may have none.
fn look(freed: &Freed) {
    // SAFETY: loom checks it.
    assert!(!freed.with(|freed| unsafe { *freed }), "used and freed");
}

fn free(take_unused: fn(&Place<Context>) -> *mut Context, places: &Model) {
    let _making = places.making.lock();
    let context = take_unused(&places.places[0]);
    if !context.is_null() {
        // SAFETY: as in `free_all`; in a twin loom reports it first.
        drop(unsafe { Box::from_raw(context) });
    }
}

/// The first thread uses a context, the second destroys it, and the third frees the destroyed context.
#[derive(Clone, Copy)]
struct Steps {
    find: fn(&Model) -> Option<InUse<'_, Context>>,
    remove: fn(InUse<'_, Context>, &Freed),
    go: fn(InUse<'_, Context>),
    take_unused: fn(&Place<Context>) -> *mut Context,
}

const STEPS: Steps = Steps {
    find,
    remove: |context, freed| {
        assert!(context.remove(HANDLE));
        look(freed);
    },
    go: |context| assert_eq!(context.handle, HANDLE),
    take_unused: Place::take_unused,
};

fn a_user_meets_the_end(steps: Steps) {
    explore(move || {
        let (places, freed) = model();
        let user = spawn(&places, {
            let freed = Arc::clone(&freed);
            move |places| {
                if let Some(context) = (steps.find)(places) {
                    look(&freed);
                    (steps.go)(context);
                }
            }
        });
        let other = spawn(&places, move |places| free(steps.take_unused, places));
        (steps.remove)(places.find(HANDLE).unwrap(), &freed);
        free(steps.take_unused, &places);
        user.join().unwrap();
        other.join().unwrap();
        places.free_removed();
        // SAFETY: loom checks it.
        assert!(freed.with(|freed| unsafe { *freed }), "never freed");
    });
}

/// Goal: a context that is destroyed while another thread finds it is freed only after its last use,
/// and all accesses of the users come before that (aio.A4).
#[test]
fn loom_places_a_user_meets_the_end() {
    a_user_meets_the_end(STEPS);
}

fn counted(place: &Place<Context>, ordering: Ordering) -> InUse<'_, Context> {
    place.users.fetch_add(1, ordering);
    InUse { place }
}

/// U1.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_a_look_after_counting_it_is_used_and_freed() {
    fn find(places: &Model) -> Option<InUse<'_, Context>> {
        let place = &places.places[0];
        (place.handle.load(Acquire) == HANDLE).then(|| counted(place, Acquire))
    }
    a_user_meets_the_end(Steps { find, ..STEPS });
}

/// U2.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_acquire_of_the_count_it_is_used_and_freed() {
    fn find(places: &Model) -> Option<InUse<'_, Context>> {
        let place = &places.places[0];
        let in_use = counted(place, Relaxed);
        (place.handle.load(Acquire) == HANDLE).then_some(in_use)
    }
    a_user_meets_the_end(Steps { find, ..STEPS });
}

/// U2: as it goes before.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_the_count_of_who_removes_it_is_used_and_freed() {
    let remove = |context: InUse<'_, Context>, _: &Freed| {
        let place = context.place;
        drop(context);
        place.handle.store(0, Release);
    };
    a_user_meets_the_end(Steps { remove, ..STEPS });
}

/// U2.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_release_of_the_count_of_who_removes_it_is_used_and_freed() {
    let remove = |context: InUse<'_, Context>, _: &Freed| {
        assert!(context.remove(HANDLE));
        context.place.users.fetch_sub(1, Relaxed);
        std::mem::forget(context);
    };
    a_user_meets_the_end(Steps { remove, ..STEPS });
}

/// U3.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_release_of_the_handle_who_removes_it_uses_it_on() {
    let remove = |context: InUse<'_, Context>, freed: &Freed| {
        let _ = context.place.handle.compare_exchange(HANDLE, 0, Relaxed, Relaxed);
        look(freed);
    };
    a_user_meets_the_end(Steps { remove, ..STEPS });
}

/// `take_unused` with other orderings.
fn take(place: &Place<Context>, handle: Ordering, users: Ordering) -> *mut Context {
    match place.handle.load(handle) == 0 && place.users.load(users) == 0 {
        true => place.context.swap(null_mut(), Relaxed),
        false => null_mut(),
    }
}

/// U3.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_acquire_of_the_handle_who_removes_it_uses_it_on() {
    let take_unused = |place: &Place<Context>| take(place, Relaxed, Acquire);
    a_user_meets_the_end(Steps { take_unused, ..STEPS });
}

/// U3.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_acquire_of_the_last_use_it_is_freed_too_early() {
    let take_unused = |place: &Place<Context>| take(place, Acquire, Relaxed);
    a_user_meets_the_end(Steps { take_unused, ..STEPS });
}

/// U3.
#[test]
#[should_panic(expected = "Causality violation")]
fn loom_places_without_release_of_the_last_use_it_is_freed_too_early() {
    let go = |context: InUse<'_, Context>| {
        context.place.users.fetch_sub(1, Relaxed);
        std::mem::forget(context);
    };
    a_user_meets_the_end(Steps { go, ..STEPS });
}

/// A thread finds a context whose handle was not passed to it, as in a program that guesses a
/// handle.
fn a_context_is_found_at_once(
    fill: fn(&Place<Context>, usize, *mut Context),
    find: fn(&Model) -> Option<InUse<'_, Context>>,
) {
    explore(move || {
        let (places, freed) = model();
        // All places are in use, from the point of view of the searching threads.
        places.used.store(2, Relaxed);
        let finder = spawn(&places, move |places| {
            let context = find(places)?;
            let found = context.place.context.load(Relaxed);
            assert!(!found.is_null(), "no context");
            assert_eq!(context.handle, OTHER);
            Some(())
        });
        let context = Box::new(Context { handle: OTHER, freed: Arc::clone(&freed) });
        fill(&places.places[1], OTHER, Box::into_raw(context));
        finder.join().unwrap();
        for handle in [HANDLE, OTHER] {
            assert!(destroy(&places, handle));
        }
    });
}

/// Goal: a thread that finds a handle finds its context.
#[test]
fn loom_places_a_context_is_found_at_once() {
    a_context_is_found_at_once(Place::fill, |places| places.find(OTHER));
}

#[test]
#[should_panic(expected = "no context")]
fn loom_places_without_release_of_the_handle_there_is_no_context() {
    let fill = |place: &Place<Context>, handle, context| {
        place.context.store(context, Relaxed);
        place.handle.store(handle, Relaxed);
    };
    a_context_is_found_at_once(fill, |places| places.find(OTHER));
}

#[test]
#[should_panic(expected = "no context")]
fn loom_places_without_acquire_of_the_handle_there_is_no_context() {
    fn find(places: &Model) -> Option<InUse<'_, Context>> {
        let in_use = counted(&places.places[1], Acquire);
        (in_use.place.handle.load(Relaxed) == OTHER).then_some(in_use)
    }
    a_context_is_found_at_once(Place::fill, find);
}

#[test]
#[should_panic(expected = "no context")]
fn loom_places_without_the_context_before_its_handle_there_is_none() {
    let fill = |place: &Place<Context>, handle, context| {
        place.handle.store(handle, Release);
        place.context.store(context, Relaxed);
    };
    a_context_is_found_at_once(fill, |places| places.find(OTHER));
}

/// Two threads destroy one context.
fn two_destroy_it(remove: fn(&InUse<'_, Context>) -> bool) {
    explore(move || {
        let (places, freed) = model();
        let destroy = move |places: &Model| {
            let removed = places.find(HANDLE).is_some_and(|context| remove(&context));
            places.free_removed();
            removed
        };
        let other = spawn(&places, destroy);
        let mine = destroy(&places);
        let theirs = other.join().unwrap();
        assert!(mine != theirs, "not by one");
        // SAFETY: loom checks it.
        assert!(freed.with(|freed| unsafe { *freed }), "never freed");
    });
}

/// Goal: of two threads that destroy a context, one does, and it is freed once.
#[test]
fn loom_places_two_destroy_it() {
    two_destroy_it(|context| context.remove(HANDLE));
}

#[test]
#[should_panic(expected = "not by one")]
fn loom_places_without_one_exchange_two_destroy_it() {
    two_destroy_it(|context| {
        let stands = context.place.handle.load(Acquire) == HANDLE;
        context.place.handle.store(0, Release);
        stands
    });
}

/// Two threads look for contexts to free, after one was removed.
fn two_free_it(locks: bool) {
    explore(move || {
        let (places, _) = model();
        places.find(HANDLE).unwrap().remove(HANDLE);
        let take = move |places: &Model| {
            let _making = locks.then(|| places.making.lock());
            places.places[0].take_unused().expose_provenance()
        };
        let other = spawn(&places, take);
        let mine = take(&places);
        let theirs = other.join().unwrap();
        assert!((mine == 0) != (theirs == 0), "not by one");
        let context = std::ptr::with_exposed_provenance_mut::<Context>(mine.max(theirs));
        // SAFETY: as in `free_all`.
        drop(unsafe { Box::from_raw(context) });
    });
}

/// Goal: of two threads that free contexts, one frees it.
#[test]
fn loom_places_two_free_it() {
    two_free_it(true);
}

#[test]
#[should_panic(expected = "not by one")]
fn loom_places_without_the_lock_two_free_it() {
    two_free_it(false);
}

/// A place gets another context while a thread looks for the first.
fn a_place_is_used_again(find: fn(&Model) -> Option<InUse<'_, Context>>) {
    explore(move || {
        let (places, freed) = model();
        let finder = spawn(&places, move |places| {
            let Some(context) = find(places) else { return };
            let found = context.place.handle.load(Relaxed);
            assert_ne!(found, OTHER, "another's");
        });
        assert!(destroy(&places, HANDLE));
        let context = Context { handle: OTHER, freed: Arc::new(UnsafeCell::new(false)) };
        assert_eq!(places.place(OTHER, context), Some(OTHER));
        finder.join().unwrap();
        assert!(destroy(&places, OTHER));
        // SAFETY: loom checks it.
        assert!(freed.with(|freed| unsafe { *freed }), "never freed");
    });
}

/// Goal: a search for a context does not find a later context in the same place.
#[test]
fn loom_places_a_place_is_used_again() {
    a_place_is_used_again(find);
}

#[test]
#[should_panic(expected = "another's")]
fn loom_places_without_a_look_after_counting_another_is_found() {
    a_place_is_used_again(|places| {
        let place = &places.places[0];
        (place.handle.load(Acquire) == HANDLE).then(|| counted(place, Acquire))
    });
}
