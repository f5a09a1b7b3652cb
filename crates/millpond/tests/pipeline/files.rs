//! Several files and engines in one pipeline.

use super::*;

/// Goal: files can be closed when `run` has returned, and their descriptors reused for other files.
#[test]
fn files_that_come_and_go() {
    for_each_engine(4, |bench| {
        let mut pipeline = bench.engine.pipeline(4).unwrap();
        for round in 0..50u8 {
            let paths: Vec<_> = (0..round % 5 + 1)
                .map(|number| {
                    bench.path.with_extension(format!("{}", number as usize + round as usize))
                })
                .collect();
            for (number, path) in paths.iter().enumerate() {
                std::fs::write(path, vec![number as u8 ^ round; 4 * PAGE]).unwrap();
            }
            let files: Vec<_> =
                paths.iter().map(|path| bench.engine.open(path, &direct()).unwrap()).collect();
            let mut number = 0;
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), PAGE);
                }
                let file = files.get(number)?;
                number += 1;
                Some(bench.write(file, number % 4, 1, number as u8))
            });
            drop(files);
            for (number, path) in paths.iter().enumerate() {
                if matches!(bench.name, "uring" | "threads") {
                    let bytes = std::fs::read(path).unwrap();
                    let page = (number + 1) % 4;
                    for (at, bytes) in bytes.chunks(PAGE).enumerate() {
                        let expected =
                            if at == page { number as u8 + 1 } else { number as u8 ^ round };
                        assert!(bytes.iter().all(|&byte| byte == expected), "{}", bench.name);
                    }
                }
                std::fs::remove_file(path).unwrap();
            }
        }
    });
}

/// Goal: one run serves more files than a ring can register.
#[test]
fn many_files_in_one_run() {
    for_each_engine(4, |bench| {
        let files: Vec<_> = (0..50u8)
            .map(|number| {
                let path = bench.path.with_extension(number.to_string());
                std::fs::write(&path, vec![number; 4 * PAGE]).unwrap();
                bench.engine.open(&path, &direct()).unwrap()
            })
            .collect();
        let mut number = 0;
        let mut seen = vec![0; 50];
        each(&mut bench.engine.pipeline(16).unwrap(), |done| {
            if let Some(done) = done {
                assert_eq!(done.outcome.unwrap(), PAGE);
                seen[done.request.slices().next().unwrap()[0] as usize] += 1;
            }
            number += 1;
            (number <= 200).then(|| bench.read(&files[number % 50], number % 4, 1))
        });
        assert_eq!(seen, [4; 50]);
    });
}

/// Goal: buffers of more regions than a ring can register are served, and reported.
#[test]
fn more_regions_than_a_ring_registers() {
    for_each_engine(64, |bench| {
        let file = bench.open(&direct());
        let mut pipeline = bench.engine.pipeline(32).unwrap();
        let mut buffers: Vec<_> = (0..1100).map(|_| bench.buffer(1, 0)).collect();
        for _ in 0..2 {
            let mut done_with = Vec::new();
            each(&mut pipeline, |done| {
                if let Some(done) = done {
                    assert_eq!(done.outcome.unwrap(), PAGE);
                    let at = done.request.offset() as usize;
                    let seen = done.request.slices().flatten();
                    assert!(seen.enumerate().all(|(from, &byte)| byte == content(at + from)));
                    done_with.extend(done.request.into_buffers());
                }
                let list = SegmentList::from_buffers(vec![buffers.pop()?]);
                let page = buffers.len() % 64;
                Some(DirectRequest::read(&file, list, (page * PAGE) as u64))
            });
            assert_eq!(done_with.len(), 1100);
            buffers = done_with;
        }
        println!("{}: {:?}", bench.name, pipeline.registration());
        let registration = pipeline.registration();
        let known = registration.registered_bytes + registration.refused_bytes;
        assert!(known == 0 || known == 1024 * PAGE as u64, "{registration:?}");
        // Other regions, in place of the freed ones.
        drop(buffers);
        let list = SegmentList::from_buffers(vec![bench.buffer(1, 0)]);
        let mut request = Some(DirectRequest::read(&file, list, 0));
        each(&mut pipeline, |done| {
            assert!(done.is_none_or(|done| done.outcome.unwrap() == PAGE));
            request.take()
        });
        let registration = pipeline.registration();
        let known = registration.registered_bytes + registration.refused_bytes;
        assert!(known <= PAGE as u64, "{registration:?}");
    });
}

/// Goal: one run of a pipeline serves files of several engines with different back ends.
#[test]
fn files_of_several_engines() {
    for_each_engine(32, |bench| {
        let others: Vec<_> = common::back_ends(2)
            .into_iter()
            .map(|(name, backend)| {
                let path = bench.path.with_extension(name);
                std::fs::copy(&bench.path, &path).unwrap();
                engine(1 << 20, backend).open(&path, &direct()).unwrap()
            })
            .collect();
        let mut number = 0;
        let mut count = 0;
        each(&mut bench.engine.pipeline(6).unwrap(), |done| {
            if let Some(done) = done {
                assert_eq!(done.outcome.unwrap(), PAGE);
                let at = done.request.offset() as usize;
                let seen = done.request.slices().flatten();
                assert!(seen.enumerate().all(|(from, &byte)| byte == content(at + from)));
                count += 1;
            }
            number += 1;
            let file = &others[number * number % 7 % others.len()];
            (number <= 200).then(|| bench.read(file, number % 32, 1))
        });
        assert_eq!(count, 200);
    });
}
