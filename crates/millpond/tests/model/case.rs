//! The steps of a random sequence, and the settings of its engine.

use super::*;

/// A range, in shares of the largest file, so that it fits every page size.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    pub page: usize,
    /// Of 256: where in the page it starts; near both ends more often than between.
    pub within: u32,
    pub nudge: i32,
    pub len: u32,
}

#[derive(Debug, Clone)]
pub enum Step {
    Open(usize),
    Close(usize),
    Read { handle: usize, span: Span, pieces: usize },
    View { handle: usize, span: Span },
    Write { handle: usize, span: Span, pieces: usize },
    Append { handle: usize, len: u32, pieces: usize },
    Truncate { handle: usize, span: Span },
    Punch { handle: usize, span: Span },
    Zero { handle: usize, span: Span },
    Allocate { handle: usize, span: Span },
    Seek { handle: usize, span: Span },
    Invalidate { handle: usize, span: Span },
    Advise { handle: usize, span: Span, advice: Advice },
    HitPath(bool),
    DropViews,
    Errors(bool),
    WriteBack { handle: usize },
    Sync { handle: usize, kind: SyncKind, span: Span },
    WriteDurably { handle: usize, span: Span },
}

#[derive(Debug, Clone, Copy)]
pub enum SyncKind {
    All,
    Data,
    Range,
}

pub fn spans() -> impl Strategy<Value = Span> {
    let lens = prop_oneof![
        3 => Just(0u32),
        20 => 1u32..2000,
        10 => prop_oneof![Just(4096u32), Just(8192), Just(65536), Just(512)],
        10 => 1u32..100_000,
        4 => 1u32..600_000,
    ];
    let within = prop_oneof![4 => Just(0u32), 2 => Just(255), 3 => 0u32..256];
    (0..FILE_PAGES, within, -2i32..3, lens).prop_map(|(page, within, nudge, len)| Span {
        page,
        within,
        nudge,
        len,
    })
}

pub fn steps() -> impl Strategy<Value = Step> {
    let handle = || 0..HANDLES;
    let pieces = || prop_oneof![3 => Just(1usize), 2 => 2usize..6, 1 => Just(1100usize)];
    let advices = prop_oneof![
        Just(Advice::Normal),
        Just(Advice::Sequential),
        Just(Advice::Random),
        Just(Advice::WillNeed),
        Just(Advice::DontNeed),
    ];
    let kinds = prop_oneof![Just(SyncKind::All), Just(SyncKind::Data), Just(SyncKind::Range)];
    prop_oneof![
        3 => handle().prop_map(Step::Open),
        3 => handle().prop_map(Step::Close),
        30 => (handle(), spans(), pieces())
            .prop_map(|(handle, span, pieces)| Step::Read { handle, span, pieces }),
        8 => (handle(), spans()).prop_map(|(handle, span)| Step::View { handle, span }),
        30 => (handle(), spans(), pieces())
            .prop_map(|(handle, span, pieces)| Step::Write { handle, span, pieces }),
        6 => (handle(), 0u32..40_000, pieces())
            .prop_map(|(handle, len, pieces)| Step::Append { handle, len, pieces }),
        8 => (handle(), spans()).prop_map(|(handle, span)| Step::Truncate { handle, span }),
        6 => (handle(), spans()).prop_map(|(handle, span)| Step::Punch { handle, span }),
        6 => (handle(), spans()).prop_map(|(handle, span)| Step::Zero { handle, span }),
        4 => (handle(), spans()).prop_map(|(handle, span)| Step::Allocate { handle, span }),
        4 => (handle(), spans()).prop_map(|(handle, span)| Step::Seek { handle, span }),
        3 => (handle(), spans()).prop_map(|(handle, span)| Step::Invalidate { handle, span }),
        5 => (handle(), spans(), advices)
            .prop_map(|(handle, span, advice)| Step::Advise { handle, span, advice }),
        2 => any::<bool>().prop_map(Step::HitPath),
        2 => Just(Step::DropViews),
        3 => any::<bool>().prop_map(Step::Errors),
        3 => handle().prop_map(|handle| Step::WriteBack { handle }),
        4 => (handle(), kinds, spans())
            .prop_map(|(handle, kind, span)| Step::Sync { handle, kind, span }),
        2 => (handle(), spans()).prop_map(|(handle, span)| Step::WriteDurably { handle, span }),
    ]
}

#[derive(Debug, Clone)]
pub struct Case {
    pub page_shift: u32,
    /// Pages that fit into the cache; 0: the smallest limit that an engine accepts.
    pub cache_pages: u64,
    pub direct: bool,
    /// Mode back: writes wait in the cache.
    pub back: bool,
    pub hit_path: bool,
    pub readahead: bool,
    /// The dirty limit, in pages.
    pub dirty_pages: u64,
    pub keep_views: bool,
    pub seed: u64,
    pub delays: bool,
    pub short_per_mille: u64,
    /// No operation is longer.
    pub bytes_max: usize,
    pub steps: Vec<Step>,
}

pub fn cases() -> impl Strategy<Value = Case> {
    let pages = prop_oneof![1 => Just(0u64), 3 => Just(3u64), 4 => 4u64..40];
    let sizes = (12u32..17, pages, 1u64..30);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let sim = (any::<u64>(), any::<bool>(), 0u64..600);
    (sizes, flags, sim, prop::collection::vec(steps(), 1..80)).prop_map(
        |(
            (page_shift, cache_pages, dirty_pages),
            (direct, back, hit_path, readahead, keep_views),
            (seed, delays, short_per_mille),
            steps,
        )| Case {
            page_shift,
            cache_pages,
            direct,
            back,
            hit_path,
            readahead,
            dirty_pages,
            keep_views,
            seed,
            delays,
            short_per_mille,
            bytes_max: usize::MAX,
            steps,
        },
    )
}
