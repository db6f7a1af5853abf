//! Stored responses: a follow-up, and whatever else is asked about one, goes where it is, from every replica.

use bytes::Bytes;
use http::Method;
use tandem_sim::Fault;

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::{Answer, Call, base};
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

const PATH: &str = "/v1/responses";
const HEADER: (&str, &str) = ("routing-strategy", "random");

fn front(tandem: &Tandem) -> String {
    base(tandem.front().expect("a front"))
}

/// Each engine answers with an id of its own, whole or as a stream.
fn script(sandbox: &Sandbox, number: usize, stream: bool) {
    for (index, engine) in sandbox.combined.iter().enumerate() {
        engine.clear_faults();
        let response =
            format!(r#"{{"id":"resp_{number}_{index}","object":"response","status":"completed","output":[]}}"#);
        let fault = Fault::on(PATH).always();
        engine.script(if stream {
            let events = ["created", "completed"].map(|event| {
                format!("event: response.{event}\ndata: {{\"type\":\"response.{event}\",\"response\":{response}}}\n\n")
            });
            fault.stream(events.into_iter().map(Bytes::from).collect())
        } else {
            fault.answer(200, "application/json", response)
        });
    }
}

/// The pod that has answered: the number in its name.
fn pod(answer: &Answer) -> usize {
    answer.header("target-pod").trim_start_matches('c').parse().expect("a pod")
}

async fn create(base: &str, members: &str) -> usize {
    let body = format!(r#"{{"model":"m","input":"a"{members}}}"#);
    let answer = Call::post(base, PATH, body).header(HEADER.0, HEADER.1).send().await;
    assert_eq!(answer.status, 200);
    let pod = pod(&answer);
    assert!(answer.body().await.complete);
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follow_up_finds_its_response_from_every_replica() {
    let redis = Redis::start().await;
    let options = SandboxOptions { pairs: 0, combined: 4, ..SandboxOptions::default() };
    let sandbox = Sandbox::start(options.env(&[("REDIS_URL", &redis.url())])).await;
    let [one, two] = &sandbox.fleet.tandems[..] else { panic!("two replicas") };
    let envoy = sandbox.fleet.envoy.as_ref().expect("Envoy").base();
    for (number, stream) in [(1, false), (2, true), (3, false), (4, true)] {
        script(&sandbox, number, stream);
        let home = create(&front(one), &format!(r#","stream":{stream}"#)).await;
        let id = format!("resp_{number}_{home}");
        // From the other replica, and through Envoy, which takes either: never elsewhere.
        for base in [front(two), envoy.clone(), front(one), envoy.clone()] {
            script(&sandbox, number + 100, false);
            assert_eq!(create(&base, &format!(r#","previous_response_id":"{id}""#)).await, home, "{base}");
            let about = format!("{PATH}/{id}");
            for (method, path) in [
                (Method::GET, about.clone()),
                (Method::GET, format!("{about}/input_items")),
                (Method::POST, format!("{about}/cancel")),
                (Method::DELETE, about.clone()),
            ] {
                sandbox.clear();
                for engine in &sandbox.combined {
                    engine.script(Fault::on(&path).answer(200, "application/json", "{}"));
                }
                let answer = Call::get(&base, &path).method(method.clone()).send().await;
                assert_eq!((answer.status.as_u16(), pod(&answer)), (200, home), "{base} {method} {path}");
                assert!(answer.body().await.complete);
                let seen = sandbox.combined[home].records_for(&path);
                assert_eq!(seen.len(), 1, "{method} {path}");
                assert_eq!((seen[0].method.as_str(), seen[0].path.as_str()), (method.as_str(), path.as_str()));
            }
        }
    }
    redis.assert_keys_expire().await;
    sandbox.engines().for_each(tandem_sim::Engine::clear_faults);
    sandbox.clear();
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_whose_pod_is_gone_is_said_to_be_lost() {
    let redis = Redis::start().await;
    let options = SandboxOptions { pairs: 0, combined: 2, ..SandboxOptions::default() };
    let mut sandbox = Sandbox::start(options.env(&[("REDIS_URL", &redis.url())])).await;
    script(&sandbox, 1, false);
    let home = create(&sandbox.paths()[0], "").await;
    let id = format!("resp_1_{home}");
    sandbox.fleet.pods.remove(&format!("c{home}"));
    for tandem in &sandbox.fleet.tandems {
        eventually(SOON, "the pod to be gone", async || {
            let page = tandem.admin_json("/debug/fleet").await;
            (page["models"]["m"]["pods"].as_array()?.len() == 1).then_some(())
        })
        .await;
    }
    let mut bases = sandbox.paths();
    bases.push(front(&sandbox.fleet.tandems[1]));
    for base in bases {
        let body = format!(r#"{{"model":"m","input":"b","previous_response_id":"{id}"}}"#);
        for call in [Call::post(&base, PATH, body), Call::get(&base, &format!("{PATH}/{id}"))] {
            let answer = call.header(HEADER.0, HEADER.1).send().await;
            assert_eq!(answer.status, 404, "{base}");
            let error = answer.json().await;
            assert_eq!(error["error"]["code"], "response_not_found");
            assert!(error["error"]["message"].as_str().is_some_and(|text| text.contains("gone")), "{error}");
        }
        let answer = Call::get(&base, &format!("{PATH}/resp_never")).send().await;
        assert_eq!(answer.status, 404, "{base}");
        assert!(answer.body().await.complete);
    }
    sandbox.engines().for_each(tandem_sim::Engine::clear_faults);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn background_and_follow_ups_reach_one_pod_of_a_pair() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for base in sandbox.paths() {
        for members in [r#","background":true"#, r#","previous_response_id":"resp_elsewhere""#] {
            sandbox.clear();
            sandbox.decode[0].script(Fault::on(PATH).answer(200, "application/json", r#"{"object":"response"}"#));
            let body = format!(r#"{{"model":"m","input":"a"{members}}}"#);
            let answer = Call::post(&base, PATH, body.clone()).send().await;
            assert_eq!(answer.status, 200, "{members}");
            assert!(answer.body().await.complete);
            assert!(sandbox.prefill[0].records_for(PATH).is_empty(), "{members}");
            assert_eq!(sandbox.decode[0].records_for(PATH)[0].body, body.as_bytes());
        }
    }
    sandbox.clear();
    sandbox.close().await;
}
