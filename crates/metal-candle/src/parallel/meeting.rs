//! How ranks without MPI find each other: at rank 0's address, or by the store of `torchrun`'s agent, which has that
//! address for itself.

use super::elsewhere;
use super::launcher::Meeting;
use super::tcp::Star;
use super::torch_store::Store;
use crate::{Error, Result};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

/// The key in the store under which rank 0 says its port, before the word of this start.
const KEY: &str = "metal-candle/";

/// Finds the other ranks.
pub(super) fn meet(meeting: &Meeting, rank: usize, size: usize, limit: Duration) -> Result<Star> {
    let Meeting { address, is_store, word, all_here } = meeting;
    let (host, port) = address;
    let failed = |error: std::io::Error| {
        let message = format!(
            "the ranks cannot meet at {host}:{port} (MASTER_ADDR and MASTER_PORT): {error}"
        );
        Error::Rank { rank: 0, message }
    };
    let mut store = match is_store {
        true => Some(Store::connect(address, limit).map_err(failed)?),
        false => None,
    };
    let key = format!("{KEY}{word}");
    if rank == 0 {
        let port = if *is_store { 0 } else { *port };
        let listener = listen(host, port, *all_here).map_err(failed)?;
        if let Some(store) = &mut store {
            let port = listener.local_addr().map_err(failed)?.port();
            store.set(&key, port.to_string().as_bytes()).map_err(failed)?;
        }
        return Star::of_root(&listener, size, word, limit);
    }
    let port = match &mut store {
        None => *port,
        Some(store) => {
            let said = store.wait(&key, limit).map_err(failed)?;
            let port = std::str::from_utf8(&said).ok().and_then(|said| said.parse().ok());
            port.ok_or_else(|| elsewhere(0, "the start"))?
        }
    };
    Star::of_other(&(host.clone(), port), rank, size, word, limit)
}

/// Listens for the ranks that come by this name of rank 0's machine. Where that is the name of a service, which no machine has
/// as its own, it listens everywhere.
fn listen(host: &str, port: u16, all_here: Option<bool>) -> std::io::Result<TcpListener> {
    match TcpListener::bind(&addresses(host, port, all_here)[..]) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
            TcpListener::bind(&everywhere(port)[..])
        }
        bound => bound,
    }
}

/// Where rank 0 listens: at the first of these that its machine has. Ranks of other machines may know it by another address
/// than the one it finds for its own name, which is 127.0.1.1 on many machines, or that of a network that isn't theirs; so it
/// listens everywhere, unless all ranks are on its machine.
fn addresses(host: &str, port: u16, all_here: Option<bool>) -> Vec<SocketAddr> {
    let is_loopback = |ip: IpAddr| ip.to_canonical().is_loopback();
    let stays_here = all_here.unwrap_or_else(|| host.parse().is_ok_and(is_loopback));
    let own: Vec<SocketAddr> = match stays_here {
        true => (host, port).to_socket_addrs().into_iter().flatten().collect(),
        false => Vec::new(),
    };
    match own.is_empty() {
        true => everywhere(port).to_vec(),
        false => own,
    }
}

/// Both in one, but for machines without IPv6.
fn everywhere(port: u16) -> [SocketAddr; 2] {
    let all = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    all.map(|ip| SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::super::torch_store::tests::serve;
    use super::*;
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(30);

    /// What three ranks gather that meet so.
    fn gathered(meeting: &Meeting) -> Vec<Vec<Vec<u8>>> {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let meeting = meeting.clone();
                thread::spawn(move || {
                    let star = meet(&meeting, rank, 3, LIMIT).unwrap();
                    assert_eq!((star.rank(), star.size()), (rank, 3));
                    let found = star.gather("the ranks", &[rank as u8]).unwrap();
                    // Rank 0 ends first.
                    if rank > 0 {
                        star.outlast_root(LIMIT);
                    }
                    found
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn ranks_meet_at_an_address_or_by_a_store() {
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        for (port, is_store) in [(free, false), (serve(), true)] {
            let address = ("localhost".to_string(), port);
            let word = "a start".into();
            let meeting = Meeting { address, is_store, word, all_here: Some(true) };
            assert_eq!(gathered(&meeting), vec![vec![vec![0], vec![1], vec![2]]; 3]);
        }
    }

    #[test]
    fn ranks_of_other_machines_reach_a_machine_that_names_itself_by_loopback() {
        let unknown = "x".repeat(64);
        for (host, all_here, everywhere) in [
            ("localhost", Some(true), false),
            ("127.0.0.1", Some(true), false),
            ("127.0.0.1", None, false),
            ("localhost", Some(false), true),
            ("127.0.0.1", Some(false), true),
            ("localhost", None, true),
            // No machine has this address, and a label may have 63 letters.
            ("192.0.2.1", Some(false), true),
            ("192.0.2.1", None, true),
            (&unknown, Some(false), true),
        ] {
            let found = listen(host, 0, all_here).unwrap().local_addr().unwrap().ip();
            let told = format!("{host}, {all_here:?}: {found}");
            assert_eq!(
                (found.is_unspecified(), found.is_loopback()),
                (everywhere, !everywhere),
                "{told}"
            );
        }
    }

    #[test]
    fn ranks_of_other_machines_may_come_by_any_address() {
        // Also where the name is one that the machine may have.
        for (host, all_here) in
            [("192.0.2.1", Some(false)), ("192.0.2.1", None), ("::1", Some(false))]
        {
            assert_eq!(addresses(host, 7, all_here), everywhere(7), "{host}, {all_here:?}");
        }
        let own = SocketAddr::from(([192, 0, 2, 1], 7));
        assert_eq!(addresses("192.0.2.1", 7, Some(true)), [own]);
    }

    #[test]
    fn ranks_that_come_by_another_name_meet() {
        let listener = listen("localhost", 0, Some(false)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let other = thread::spawn(move || {
            Star::of_other(&("127.0.0.1".into(), port), 1, 2, "a start", LIMIT).unwrap().size()
        });
        assert_eq!(Star::of_root(&listener, 2, "a start", LIMIT).unwrap().size(), 2);
        assert_eq!(other.join().unwrap(), 2);
    }

    #[test]
    fn nobody_there_is_told_with_the_address() {
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        for (rank, is_store) in [(1, false), (0, true)] {
            let address = ("127.0.0.1".to_string(), free);
            let meeting = Meeting { address, is_store, word: String::new(), all_here: None };
            let error = meet(&meeting, rank, 2, Duration::from_millis(200)).unwrap_err();
            let told = error.to_string();
            assert!(told.contains(&format!("127.0.0.1:{free}")), "{told}");
        }
        let address = ("127.0.0.1".to_string(), serve());
        let meeting = Meeting { address, is_store: true, word: String::new(), all_here: None };
        let error = meet(&meeting, 1, 2, Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("nobody has set"), "{error}");
    }
}
