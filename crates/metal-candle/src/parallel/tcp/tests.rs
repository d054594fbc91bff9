use super::*;
use std::net::{Ipv4Addr, TcpListener};
use std::thread;

const WORD: &str = "a run";

/// What each rank of a group comes to, by rank.
fn each<T: Send + 'static>(
    size: usize,
    limit: Duration,
    act: impl Fn(Star) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = ("127.0.0.1".to_string(), listener.local_addr().unwrap().port());
    let others: Vec<_> = (1..size)
        .map(|rank| {
            let (address, act) = (address.clone(), act.clone());
            thread::spawn(move || act(Star::of_other(&address, rank, size, WORD, limit).unwrap()))
        })
        .collect();
    let root = act(Star::of_root(&listener, size, WORD, limit).unwrap());
    std::iter::once(root).chain(others.into_iter().map(|it| it.join().unwrap())).collect()
}

const LONG: Duration = Duration::from_secs(60);

fn rank_of(error: &Error) -> usize {
    match error {
        Error::Rank { rank, .. } => *rank,
        other => panic!("{other}"),
    }
}

#[test]
fn all_get_what_each_has_given() {
    for size in [2, 3, 5] {
        let all = each(size, LONG, move |star| {
            let mut found = Vec::new();
            for round in 0..20usize {
                // Of any length, more than a connection takes at once among them.
                let length = [0, 1, 70_000, 3 << 20][(star.rank() + round) % 4];
                let given = vec![star.rank() as u8 + 1; length];
                found.push(star.gather("a round", &given).unwrap());
            }
            found
        });
        for found in &all {
            assert_eq!(found, &all[0]);
            for (round, parts) in found.iter().enumerate() {
                for (rank, part) in parts.iter().enumerate() {
                    let length = [0, 1, 70_000, 3 << 20][(rank + round) % 4];
                    assert!(part.len() == length && part.iter().all(|it| *it == rank as u8 + 1));
                }
            }
        }
    }
}

#[test]
fn a_rank_that_is_gone_is_named_by_all_others() {
    for gone in 0..3 {
        let all = each(3, LONG, move |star| match star.rank() == gone {
            true => None,
            false => Some(star.gather("a step", &[1]).unwrap_err()),
        });
        for (rank, error) in all.iter().enumerate() {
            assert_eq!(error.is_none(), rank == gone);
            if let Some(error) = error {
                assert_eq!(rank_of(error), gone, "{error}");
                assert!(error.to_string().contains("is lost"), "{error}");
            }
        }
    }
}

#[test]
fn a_rank_that_stands_still_is_named() {
    let limit = Duration::from_millis(300);
    let all = each(3, limit, move |star| {
        if star.rank() == 2 {
            thread::sleep(Duration::from_secs(2));
        }
        star.gather("a step", &[])
    });
    for error in all.iter().map(|it| it.as_ref().unwrap_err()) {
        assert_eq!(rank_of(error), 2, "{error}");
        assert!(error.to_string().contains("within 0.3 s"), "{error}");
    }
}

#[test]
fn a_rank_at_another_place_is_named() {
    let all = each(3, LONG, |star| {
        star.gather(if star.rank() == 1 { "an evaluation" } else { "a step" }, &[])
    });
    for error in all.iter().map(|it| it.as_ref().unwrap_err()) {
        assert_eq!(rank_of(error), 1, "{error}");
        assert!(error.to_string().contains("another place"), "{error}");
    }
}

/// Waits for what never comes over another way.
fn watch(star: &Star) -> Error {
    let begun = Instant::now();
    loop {
        if let Err(error) = star.watch("a sum", begun) {
            return error;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn who_waits_elsewhere_learns_of_a_rank_that_is_gone() {
    for gone in 0..3 {
        let all = each(3, LONG, move |star| match star.rank() == gone {
            true => None,
            false => Some(watch(&star)),
        });
        for error in all.iter().flatten() {
            assert_eq!(rank_of(error), gone, "{error}");
        }
    }
}

#[test]
fn who_waits_elsewhere_learns_of_a_rank_that_stands_still() {
    let limit = Duration::from_millis(300);
    let all = each(3, limit, move |star| match star.rank() {
        1 => {
            // Neither says that it waits, nor ends.
            thread::sleep(limit + GRACE);
            None
        }
        _ => Some(watch(&star)),
    });
    for error in all.iter().flatten() {
        assert_eq!(rank_of(error), 1, "{error}");
    }
}

/// After which no rank is in its start any more, where it would answer.
const STARTED: Duration = Duration::from_secs(2);

/// Ranks 0 and 1 notice over another way that one is lost, and rank 3 looks at its connection alone.
fn of_cut(lost: impl Fn(Star) + Copy + Send + 'static) -> Vec<Error> {
    let all = each(4, LONG, move |star| match star.rank() {
        0 | 1 => {
            thread::sleep(STARTED);
            Some(star.cut("remote process exited"))
        }
        2 => {
            lost(star);
            None
        }
        _ => Some(watch(&star)),
    });
    all.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_another_way_has_lost_is_named() {
    let found = of_cut(drop);
    assert_eq!(found.len(), 3);
    for error in found {
        assert_eq!(rank_of(&error), 2, "{error}");
        assert!(error.to_string().contains("connection has ended"), "{error}");
    }
    // Its machine is gone: the connection stays, and nobody answers.
    let found = of_cut(|star| {
        thread::sleep(STARTED + GRACE + Duration::from_secs(3));
        drop(star);
    });
    for error in found {
        assert_eq!(rank_of(&error), 2, "{error}");
        assert!(error.to_string().contains("didn't answer for 5 s"), "{error}");
        assert!(error.to_string().contains("remote process exited"), "{error}");
    }
}

#[test]
fn a_way_that_fails_where_all_answer_names_who_has_noticed_it() {
    // One waits for the others' parts, and one for what comes over another way.
    for gathers in [false, true] {
        let all = each(3, LONG, move |star| match star.rank() {
            2 => star.cut("connection timed out"),
            _ if gathers => star.gather("a step", &[]).unwrap_err(),
            _ => watch(&star),
        });
        for error in all {
            assert_eq!(rank_of(&error), 2, "{error}");
            assert!(error.to_string().contains("connection timed out"), "{error}");
        }
    }
}

#[test]
fn a_way_of_rank_0_that_fails_where_all_answer_is_told_as_its_own() {
    let all = each(3, LONG, |star| match star.rank() {
        0 => star.cut("connection timed out"),
        _ => watch(&star),
    });
    for error in all {
        // Not rank 0, which others wait for then.
        assert_eq!(rank_of(&error), 1, "{error}");
        assert!(error.to_string().contains("is cut off from rank 0, or another"), "{error}");
    }
}

#[test]
fn all_that_do_not_answer_are_named() {
    let all = each(4, LONG, |star| match star.rank() {
        0 => Some(watch(&star)),
        1 => {
            thread::sleep(STARTED);
            Some(star.cut("remote process exited"))
        }
        _ => {
            thread::sleep(STARTED + GRACE + Duration::from_secs(3));
            None
        }
    });
    for error in all.iter().flatten() {
        assert_eq!(rank_of(error), 2, "{error}");
        assert!(error.to_string().contains("for 5 s, nor did 3; one of them is lost"), "{error}");
    }
}

#[test]
fn who_has_said_that_its_way_has_failed_and_ends_is_not_the_one_that_is_lost() {
    let all = each(3, LONG, |star| match star.rank() {
        0 => {
            // Until the other has ended.
            thread::sleep(Duration::from_secs(2));
            Some(star.gather("a step", &[]).unwrap_err())
        }
        1 => {
            let mut connections = star.connections.borrow_mut();
            connections[0].send(Kind::Cut, 0, b"remote process exited");
            None
        }
        _ => {
            thread::sleep(GRACE + Duration::from_secs(5));
            None
        }
    });
    let error = all[0].as_ref().unwrap();
    assert_eq!(rank_of(error), 2, "{error}");
    assert!(error.to_string().contains("didn't answer for 5 s"), "{error}");
}

/// Tells others for so long that rank 0 is busy.
fn be_busy(star: &Star, time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        star.tell_busy();
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_rank_that_says_that_it_is_busy_is_waited_for() {
    let limit = Duration::from_millis(200);
    let all = each(3, limit, move |star| {
        match star.rank() {
            0 => be_busy(&star, limit + GRACE + Duration::from_secs(1)),
            // Waits for it on other ways.
            2 => {
                let begun = Instant::now();
                while begun.elapsed() < limit + GRACE + Duration::from_millis(500) {
                    star.watch("a sum", begun)?;
                    thread::sleep(Duration::from_millis(1));
                }
            }
            _ => {}
        }
        star.gather("the end", &[star.rank() as u8])
    });
    for found in all {
        assert_eq!(found.unwrap(), [[0], [1], [2]]);
    }
}

#[test]
fn a_rank_that_was_busy_and_is_lost_is_named() {
    let limit = Duration::from_millis(200);
    for is_gone in [false, true] {
        let all = each(3, limit, move |star| {
            if star.rank() == 0 {
                be_busy(&star, Duration::from_millis(500));
                if !is_gone {
                    thread::sleep(limit + GRACE + Duration::from_secs(1));
                }
                return None;
            }
            Some(star.gather("the end", &[]).unwrap_err())
        });
        for error in all.iter().skip(1).map(|it| it.as_ref().unwrap()) {
            let expected = if is_gone { "is lost" } else { "within 0.2 s" };
            assert_eq!(rank_of(error), 0, "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn what_was_late_once_is_forgotten() {
    let limit = Duration::from_millis(200);
    let all = each(2, limit, move |star| {
        let begun = Instant::now();
        while begun.elapsed() < limit + Duration::from_millis(300) {
            star.watch("a sum", begun)?;
            thread::sleep(Duration::from_millis(1));
        }
        star.gather("a step", &[1])?;
        star.watch("another sum", Instant::now())?;
        star.gather("another step", &[2])
    });
    for found in all {
        assert_eq!(found.unwrap(), [[2], [2]]);
    }
}

#[test]
fn strangers_are_no_ranks() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = ("127.0.0.1".to_string(), port);
    let stranger = thread::spawn(move || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n").unwrap();
        let of_another_run = Star::of_other(
            &("127.0.0.1".to_string(), port),
            1,
            2,
            "another run",
            Duration::from_millis(100),
        );
        assert!(of_another_run.is_err());
        Star::of_other(&address, 1, 2, WORD, LONG).unwrap().gather("a step", &[7]).unwrap()
    });
    let star = Star::of_root(&listener, 2, WORD, LONG).unwrap();
    assert_eq!(star.gather("a step", &[]).unwrap(), [vec![], vec![7]]);
    assert_eq!(stranger.join().unwrap(), [vec![], vec![7]]);
}

#[test]
fn ranks_of_other_counts_and_numbers_are_refused() {
    for (rank, size, expected) in [(1, 3, "one of 3 processes"), (2, 2, "no rank of this run")] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = ("127.0.0.1".to_string(), listener.local_addr().unwrap().port());
        let other = thread::spawn(move || Star::of_other(&address, rank, size, WORD, LONG));
        let error = Star::of_root(&listener, 2, WORD, LONG).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        drop(listener);
        assert!(other.join().unwrap().is_err());
    }
}

#[test]
fn messages_that_nobody_takes_are_told_to_all_before_they_are_sent() {
    let all = each(3, LONG, |mut star| {
        star.longest = 3 * (8 + 10);
        star.gather("a step", &[1; 10]).unwrap();
        star.gather("another step", &[1; 11]).unwrap_err()
    });
    for error in all {
        assert_eq!(rank_of(&error), 0, "{error}");
        let told = error.to_string();
        assert!(
            told.contains("57 bytes for another step") && told.contains("at most 54"),
            "{told}"
        );
    }
}

#[test]
fn a_message_of_a_rank_that_nobody_takes_is_told_before_it_is_sent() {
    let all = each(2, LONG, |star| {
        star.require_sendable("a step", LONGEST).unwrap();
        star.require_sendable("a step", LONGEST + 1).unwrap_err().to_string()
    });
    for told in all {
        let bytes = ["1073741825 bytes for a step", "1073741824"];
        assert!(bytes.iter().all(|it| told.contains(it)), "{told}");
    }
}

#[test]
fn nonsense_ends_a_connection_and_takes_no_memory() {
    let all = each(2, LONG, |star| {
        if star.rank() == 1 {
            let mut message = vec![Kind::Given as u8];
            message.extend(place("a step").to_le_bytes());
            message.extend(u64::MAX.to_le_bytes());
            star.connections.borrow_mut()[0].stream.write_all(&message).unwrap();
            return None;
        }
        Some(star.gather("a step", &[]).unwrap_err())
    });
    assert_eq!(rank_of(all[0].as_ref().unwrap()), 1);
}
