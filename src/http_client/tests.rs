//! Requests whose connection ends in the instant in which they are handed to it.

use std::collections::BTreeMap;
use std::future::{pending, ready};
use std::net::TcpListener;
use std::time::Duration;

use http_body_util::Full;

use super::*;

#[tokio::test]
async fn a_lost_request_is_not_waited_for_and_an_answer_comes_first() {
    assert!(matches!(unless_lost(pending::<()>(), ready(())).await, Err(RequestError::Unsent)));
    assert_eq!(unless_lost(ready(7), ready(())).await.unwrap(), 7);
    assert_eq!(unless_lost(ready(7), pending()).await.unwrap(), 7);
}

/// The queue between the tasks loses about one of 20,000 such requests, whose responses would be waited for without end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_meet_the_end_of_their_connection_end_too() {
    const TRIES: u64 = 10_000;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        // Closed at once or up to 70 us later: from before the request is handed over until it is written.
        for round in 0.. {
            let (stream, _) = listener.accept().unwrap();
            for _ in 0..(round * 7919 % 2000) {
                std::hint::spin_loop();
            }
            drop(stream);
        }
    });
    let pooling =
        Pooling { idle_per_host: 4, idle_time: Duration::from_secs(1), connect_timeout: Duration::from_secs(5) };
    let client = HttpClient::new(pooling, None);
    let mut outcomes = BTreeMap::new();
    for _ in 0..TRIES {
        let request = Request::post(format!("http://{address}/")).body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(30), client.request(request)).await;
        let error = ended.expect("the request ends with its connection").expect_err("the server answers nothing");
        *outcomes.entry(error.to_string()).or_insert(0) += 1;
    }
    assert!(
        outcomes.contains_key(&RequestError::Unsent.to_string()),
        "the close comes too late to try it: {outcomes:?}"
    );
}
