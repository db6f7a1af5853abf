//! Connections that the engine closes while nobody looks.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;

use crate::engines::leg::{EngineClient, LegFailure, LegOutcome, LegRequest};

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";

/// Far more than the sockets' buffers hold.
const BIG: usize = 20 << 20;

/// What the engine does on one connection after it has answered the first request, and is told to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It closes the connection.
    Close,
    /// It says so before.
    SayAndClose,
    /// It answers further requests.
    Answer,
    /// It closes when it has read something of the next request.
    CloseInNext,
}

/// An engine in a thread of its own, since the test blocks the runtime's.
struct Threaded {
    address: SocketAddr,
    /// The number of the connection that a request came over.
    asked: mpsc::Receiver<usize>,
    /// Where connections wait before they close, twice: to begin, and to have done so.
    close: Arc<Barrier>,
}

fn engine(connections: Vec<Then>) -> Threaded {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (requests, asked) = mpsc::channel();
    let close = Arc::new(Barrier::new(2));
    let barrier = Arc::clone(&close);
    std::thread::spawn(move || {
        for (number, then) in connections.into_iter().enumerate() {
            let (mut stream, _) = listener.accept().unwrap();
            let (requests, barrier) = (requests.clone(), Arc::clone(&barrier));
            std::thread::spawn(move || {
                for request in 0.. {
                    let mut read = Vec::new();
                    while !read.ends_with(b"\r\n\r\n{}") {
                        let mut buffer = [0; 4096];
                        let Ok(length @ 1..) = stream.read(&mut buffer) else { return };
                        read.extend_from_slice(&buffer[..length]);
                        if request > 0 && then == Then::CloseInNext {
                            let _ = requests.send(number);
                            return;
                        }
                    }
                    let _ = requests.send(number);
                    stream.write_all(ANSWER).unwrap();
                    if matches!(then, Then::Close | Then::SayAndClose) {
                        barrier.wait();
                    }
                    if then == Then::SayAndClose {
                        let late = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                        stream.write_all(late).unwrap();
                    }
                    if matches!(then, Then::Close | Then::SayAndClose) {
                        drop(stream);
                        barrier.wait();
                        return;
                    }
                }
            });
        }
    });
    Threaded { address, asked, close }
}

async fn ask(client: &EngineClient, address: SocketAddr, body: Bytes) -> LegOutcome {
    let outcome = client
        .prefill(LegRequest {
            address: address.to_string().into(),
            path: "/v1/completions".to_owned(),
            headers: HeaderMap::new(),
            body,
            timeout: Duration::from_mins(10),
            max_answer_bytes: 1 << 20,
        })
        .await;
    // The connection goes back to the pool: its tasks are ready to run.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    outcome
}

fn answered(outcome: &LegOutcome) {
    let LegOutcome::Answered { status: http::StatusCode::OK, .. } = outcome else { panic!("{outcome:?}") };
}

const BODY: Bytes = Bytes::from_static(b"{}");

/// Blocking the thread is what a stop of the process is to the runtime: it does not learn of the close before it sends.
#[tokio::test]
async fn a_request_that_meets_a_closed_connection_goes_over_a_new_one() {
    for then in [Then::Close, Then::SayAndClose] {
        let Threaded { address, asked, close } = engine(vec![then, Then::Answer]);
        let client = EngineClient::new();
        answered(&ask(&client, address, BODY).await);
        close.wait();
        close.wait();
        answered(&ask(&client, address, BODY).await);
        // Each came once.
        assert_eq!((asked.try_recv(), asked.try_recv()), (Ok(0), Ok(1)), "{then:?}");
        assert!(asked.try_recv().is_err());
    }
}

#[tokio::test]
async fn a_request_that_was_sent_in_part_is_not_sent_again() {
    let Threaded { address, asked, .. } = engine(vec![Then::CloseInNext, Then::Answer]);
    let client = EngineClient::new();
    answered(&ask(&client, address, BODY).await);
    let outcome = ask(&client, address, Bytes::from(vec![b' '; BIG])).await;
    let LegOutcome::Failed { class: LegFailure::Transport, sent: true, .. } = outcome else { panic!("{outcome:?}") };
    // Both over the first connection.
    assert_eq!((asked.try_recv(), asked.try_recv()), (Ok(0), Ok(0)));
    assert!(asked.try_recv().is_err());
}

#[tokio::test]
async fn connections_are_used_again_until_they_are_forgotten() {
    let Threaded { address, asked, .. } = engine(vec![Then::Answer, Then::Answer]);
    let client = EngineClient::new();
    for expected in [0, 0, 0] {
        answered(&ask(&client, address, BODY).await);
        assert_eq!(asked.try_recv(), Ok(expected));
    }
    client.clone().forget_connections();
    for expected in [1, 1] {
        answered(&ask(&client, address, BODY).await);
        assert_eq!(asked.try_recv(), Ok(expected), "by every clone");
    }
}
