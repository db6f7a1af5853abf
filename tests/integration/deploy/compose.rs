//! The compose file: what it names exists, and its commands, run as processes of this machine, make one working system. (That
//! the file is valid at all, `manifests.py` has checked.)

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;

use serde_json::{Value, json};

use super::{bytes, documented, list, path, rendered, text, word, yaml};
use crate::harness::envoy::{Envoy, EnvoyOptions, SHIPPED_FILE, shipped_text};
use crate::harness::http::{Call, base};
use crate::harness::oracle::oracle;
use crate::harness::otlp::{Collector, Span};
use crate::harness::process::{Process, Start};
use crate::harness::redis::Redis;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually};

const REPLICAS: [&str; 2] = ["tandem-0", "tandem-1"];
const ENGINES: [&str; 4] = ["prefill-0", "decode-0", "prefill-1", "decode-1"];

fn service(name: &str) -> &'static Value {
    let service = &rendered().compose["services"][name];
    assert!(service.is_object(), "{name}");
    service
}

fn environment(name: &str) -> BTreeMap<&'static str, &'static str> {
    let entries = service(name)["environment"].as_object().expect("a mapping");
    entries.iter().map(|(name, value)| (name.as_str(), word(value))).collect()
}

fn command(name: &str) -> Vec<&'static str> {
    list(&service(name)["command"]).iter().map(word).collect()
}

/// Names by which containers find others.
fn host_names() -> BTreeMap<String, Vec<String>> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, service) in rendered().compose["services"].as_object().expect("services") {
        let aliases = list(&service["networks"]["default"]["aliases"]).iter().map(|alias| word(alias).to_owned());
        for alias in aliases.chain([name.clone()]) {
            names.entry(alias).or_default().push(name.clone());
        }
    }
    names
}

/// The configuration that Envoy's container makes for itself.
fn envoys_configuration() -> String {
    assert_eq!(service("envoy")["entrypoint"], json!(["sh", "-ec"]));
    let [script] = command("envoy")[..] else { panic!("one script") };
    // Compose's own escape.
    let script = script.replace("$$", "$");
    let (makes, runs) = script.trim_end().split_once('\n').expect("two lines");
    assert_eq!(runs, "exec envoy -c /tmp/envoy.yaml");
    let directory = tempfile::tempdir().unwrap();
    let made = directory.path().join("envoy.yaml");
    let makes = makes.replace("/etc/envoy/envoy.yaml", SHIPPED_FILE).replace("/tmp/envoy.yaml", made.to_str().unwrap());
    let status = Command::new("sh").args(["-ec", &makes]).status().expect("run sh");
    assert!(status.success(), "{makes}");
    std::fs::read_to_string(made).expect("what the script made")
}

/// Every trace is kept, as the container's script has it.
fn keep_all(config: &mut Value) {
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let sampler = &mut manager["tracing"]["provider"]["typed_config"]["sampler"]["typed_config"];
    sampler["wrapped_sampler"]["typed_config"]["sampling_percentage"]["numerator"] = 100.into();
}

#[test]
fn what_it_names_exists() {
    let compose = &rendered().compose;
    let services = compose["services"].as_object().expect("services");
    let documented = documented();
    for replica in REPLICAS {
        let environment = environment(replica);
        for name in environment.keys() {
            assert!(documented.contains_key(*name), "{replica}: no such variable: {name}");
        }
        assert_eq!(environment["POD_NAME"], replica);
        let seconds = |name: &str| environment[name].parse::<u64>().expect(name);
        let needed = seconds("TANDEM_DRAIN_PROPAGATION_SECONDS") + seconds("TANDEM_DRAIN_TIMEOUT_SECONDS") + 5;
        assert!(super::seconds(&service(replica)["stop_grace_period"]).as_secs() >= needed, "{replica}");
    }
    for (name, service) in services {
        let context = &service["build"];
        assert!(context.is_null() || context == ".", "{name}");
        assert_eq!(context == ".", word(&service["image"]).starts_with("tandem:"), "{name}");
        let tag = word(&service["image"]).rsplit_once(':').map(|(_, tag)| tag);
        assert!(tag.is_some_and(|tag| tag != "latest"), "{name}: pinned");
        for (needed, condition) in service["depends_on"].as_object().into_iter().flatten() {
            let healthy = condition["condition"] == "service_healthy";
            assert!(!healthy || services[needed]["healthcheck"].is_object(), "{name}: {needed} tells no health");
        }
        for volume in list(&service["volumes"]) {
            let (source, rest) = word(volume).split_once(':').expect("a bind mount");
            assert!(rest.ends_with(":ro"), "{name}: {volume}");
            let source = source.strip_prefix("./").expect("a path of this repository");
            // Dashboards and rules: folders of their own.
            let others = ["deploy/grafana", "deploy/prometheus"].contains(&source);
            assert!(others || path(source).exists(), "{name}: {source}");
        }
        for port in list(&service["ports"]) {
            assert!(word(port).starts_with("127.0.0.1:"), "{name}: nothing is open to the network: {port}");
        }
        if let Some(test) = service["healthcheck"]["test"].as_array() {
            let script = word(&test[test.len() - 1]);
            assert!(!script.replace("$$", "").contains('$'), "{name}: compose would replace a variable: {script}");
        }
    }
    // What the comment at the top lists is what is open.
    let published: BTreeSet<&str> = services
        .values()
        .flat_map(|service| list(&service["ports"]))
        .filter_map(|port| word(port).split(':').nth(1))
        .collect();
    let comment = text("docker-compose.yml");
    let comment: String = comment.lines().take_while(|line| line.starts_with('#')).collect();
    assert!(published.len() >= 6 && published.iter().all(|port| comment.contains(port)), "{published:?}");
}

#[test]
fn every_address_in_the_configurations_is_a_container() {
    let names = host_names();
    let config: Value = serde_saphyr::from_str(&envoys_configuration()).expect("YAML");
    let mut found = BTreeSet::new();
    for cluster in list(&config["static_resources"]["clusters"]) {
        for endpoint in list(&cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]) {
            found.insert(word(&endpoint["endpoint"]["address"]["socket_address"]["address"]).to_owned());
        }
    }
    assert_eq!(found, BTreeSet::from(["tandem", "otel-collector"].map(str::to_owned)));
    assert_eq!(names["tandem"], REPLICAS, "both replicas");
    assert_eq!(names["otel-collector"], ["jaeger"]);
    for replica in REPLICAS {
        let environment = environment(replica);
        assert_eq!(environment["REDIS_URL"], "redis://redis:6379");
        assert_eq!(environment["OTEL_EXPORTER_OTLP_ENDPOINT"], "http://otel-collector:4317");
    }
    let prometheus = yaml("deploy/compose/prometheus.yml");
    let targets = list(&prometheus["scrape_configs"]).iter().flat_map(|job| list(&job["static_configs"][0]["targets"]));
    let targets: BTreeSet<&str> = targets.map(word).collect();
    for replica in REPLICAS {
        assert!(targets.contains(&*format!("{replica}:8080")));
    }
    for target in &targets {
        assert!(names.contains_key(target.split(':').next().expect("a host")), "{target}");
    }
    let sources = yaml("deploy/compose/grafana/provisioning/datasources/all.yaml");
    for source in list(&sources["datasources"]) {
        let host = word(&source["url"]).trim_start_matches("http://").split(':').next().expect("a host").to_owned();
        assert!(names.contains_key(&host), "{host}");
    }
    let provider = yaml("deploy/compose/grafana/provisioning/dashboards/all.yaml");
    let folder = word(&provider["providers"][0]["options"]["path"]);
    let mounted =
        list(&service("grafana")["volumes"]).iter().any(|volume| word(volume).contains(&format!(":{folder}:")));
    assert!(mounted, "{folder}");
}

/// The documents of `deploy/compose/pods.yaml`.
fn pods() -> Vec<Value> {
    let text = text("deploy/compose/pods.yaml");
    let documents = text.split("\n---\n").map(|document| serde_saphyr::from_str(document).expect("a pod"));
    documents.collect()
}

#[test]
fn the_pods_file_repeats_the_addresses_of_the_engines() {
    let pods = pods();
    assert_eq!(pods.len(), ENGINES.len());
    for (pod, engine) in pods.iter().zip(ENGINES) {
        assert_eq!(pod["metadata"]["name"], engine);
        let (role, number) = engine.split_once('-').expect("a role");
        assert_eq!(pod["metadata"]["labels"]["role-name"], role);
        assert_eq!(pod["metadata"]["labels"]["roleset-name"], format!("group-{number}"));
        assert_eq!(pod["status"]["podIP"], service(engine)["networks"]["default"]["ipv4_address"]);
        let command = command(engine);
        let after = |flag: &str| command[command.iter().position(|word| *word == flag).expect(flag) + 1];
        assert_eq!((after("--role"), after("--model")), (role, "demo"));
        assert_eq!(pod["metadata"]["labels"]["model.aibrix.ai/port"], after("--port"));
        assert_eq!(after("--bind"), "0.0.0.0");
    }
    // Docker hands out the other half of the subnet by itself.
    let network = &rendered().compose["networks"]["default"]["ipam"]["config"][0];
    assert_eq!((&network["subnet"], &network["ip_range"]), (&json!("172.31.77.0/24"), &json!("172.31.77.128/25")));
    assert!(pods.iter().all(|pod| {
        word(&pod["status"]["podIP"]).rsplit('.').next().and_then(|last| last.parse::<u8>().ok()) < Some(128)
    }));
}

/// An engine's command as a process of this machine; and where it listens.
async fn engine(name: &str) -> (Process, SocketAddr) {
    let mut start = Start::new(name, env!("CARGO_BIN_EXE_tandem"));
    let local = |word: &'static str| match word {
        "0.0.0.0" => "127.0.0.1",
        "8000" => "0",
        other => other,
    };
    start.args(command(name).into_iter().map(local));
    let process = start.spawn();
    let address = eventually(SOON, name, async || {
        let stdout = process.stdout();
        let line = stdout.lines().next().filter(|_| stdout.contains('\n'))?;
        serde_json::from_str::<Value>(line).ok()?["address"].as_str()?.parse().ok()
    })
    .await;
    (process, address)
}

#[tokio::test(flavor = "multi_thread")]
async fn its_commands_make_one_working_system() {
    let collector = Collector::start().await;
    let arguments = command("redis");
    assert_eq!(arguments[0], "redis-server");
    let redis = Redis::start_with(|| arguments[1..].iter().map(|&word| word.to_owned()).collect()).await;
    let memory = redis.command(&["INFO", "memory"]).await;
    assert!(memory.contains("maxmemory_policy:noeviction"), "{memory}");

    let directory = tempfile::tempdir().unwrap();
    let pods_file = directory.path().join("pods.yaml");
    let (mut engines, mut manifests) = (Vec::new(), Vec::new());
    for (name, mut pod) in ENGINES.into_iter().zip(pods()) {
        let (process, address) = engine(name).await;
        pod["status"]["podIP"] = address.ip().to_string().into();
        pod["metadata"]["labels"]["model.aibrix.ai/port"] = address.port().to_string().into();
        manifests.push(pod.to_string());
        engines.push((process, address));
    }
    std::fs::write(&pods_file, manifests.join("\n---\n")).unwrap();

    let mut tandems = Vec::new();
    for replica in REPLICAS {
        let mut words = command(replica);
        let file = words.pop().expect("a file");
        assert_eq!(words, ["serve", "--pods"]);
        let mount = format!("./deploy/compose/pods.yaml:{file}:ro");
        assert!(list(&service(replica)["volumes"]).iter().any(|volume| word(volume) == mount));
        let env = environment(replica).into_iter().map(|(name, value)| {
            let value = match name {
                "REDIS_URL" => redis.url(),
                "OTEL_EXPORTER_OTLP_ENDPOINT" => base(collector.grpc()),
                _ => value.to_owned(),
            };
            (name.to_owned(), value)
        });
        let options = TandemOptions { pods: pods_file.clone(), env: env.collect(), front: false, args: Vec::new() };
        tandems.push(Tandem::start(options).await);
    }
    for tandem in &tandems {
        tandem.wait_ready().await;
    }
    // The harness reads the shipped file and switches the same on: see that the container's script does neither more nor less.
    let mut expected: Value = serde_saphyr::from_str(&shipped_text(SHIPPED_FILE, true)).unwrap();
    keep_all(&mut expected);
    assert_eq!(serde_saphyr::from_str::<Value>(&envoys_configuration()).unwrap(), expected);
    let envoy = Envoy::start_with(EnvoyOptions {
        failover: None,
        tandem_grpc: tandems.iter().map(Tandem::grpc).collect(),
        tandem_http: tandems[0].http(),
        healthy: None,
        otel: Some(collector.grpc()),
        edit: Some(keep_all),
    })
    .await;

    // The request of README.md.
    let body = json!({"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": true});
    let call = Call::post(&envoy.base(), "/v1/chat/completions", body.to_string()).header("routing-strategy", "pd");
    let answer = call.send().await;
    assert_eq!(answer.status, 200);
    assert!(
        answer.header("target-pod").starts_with("decode-")
            && answer.header("prefill-target-pod").starts_with("prefill-")
    );
    let trace = answer.header("request-id").to_owned();
    assert!(answer.body().await.complete);
    let models = Call::get(&envoy.base(), "/v1/models").send().await;
    assert_eq!(models.json().await["data"][0]["id"], "demo");

    for tandem in &tandems {
        eventually(SOON, "the replicas share their state", async || {
            let state = tandem.admin_json("/debug/state").await;
            let model = state["models"].as_object()?.values().next()?;
            (model["members"].as_u64() == Some(2)).then_some(())
        })
        .await;
    }
    let services = collector
        .wait_for("the trace, from Envoy and from Tandem", |spans: &[Span]| {
            let of_it = spans.iter().filter(|span| span.trace_id == trace).map(|span| span.service.clone());
            Some(of_it.collect::<BTreeSet<_>>()).filter(|services| services.len() >= 2)
        })
        .await;
    assert_eq!(services, BTreeSet::from(["aibrix-gateway-plugin", "tandem-envoy"].map(str::to_owned)));
    for (process, address) in &engines {
        let violations = Call::get(&base(*address), "/sim/violations").send().await.json().await;
        assert_eq!(violations, json!([]), "{}", process.logs());
    }
    oracle(&tandems, &[]).await;
}

#[test]
fn the_password_of_the_cluster_reaches_redis_by_standard_input() {
    let objects = &rendered().kustomize[super::ALL];
    let deployment = super::object(objects, "Deployment", "aibrix-redis-master");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let [shell, flag, script] = list(&container["command"]) else { panic!("{container}") };
    assert_eq!((word(shell), word(flag)), ("sh", "-ec"));
    assert!(bytes(&container["resources"]["limits"]["memory"]) > 0);
    let config = super::object(objects, "ConfigMap", "aibrix-redis");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("redis.conf");
    std::fs::write(&file, word(&config["data"]["redis.conf"])).unwrap();
    // The server's part is played by cat: what would it read?
    let script = word(script).replace("/etc/redis/redis.conf", file.to_str().unwrap()).replace("redis-server -", "cat");
    let output = Command::new("sh").args(["-ec", &script]).env("REDIS_PASSWORD", "s3cret with space").output().unwrap();
    let read = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(read.ends_with("\nrequirepass \"s3cret with space\"\n"), "{read}");
    // And the real one accepts all of it.
    let redis = crate::harness::process::tool("TANDEM_TEST_REDIS", "redis-server");
    let mut child = Command::new(redis)
        .args(["-", "--port", "0", "--unixsocket", directory.path().join("socket").to_str().unwrap()])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("run redis");
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), read.as_bytes()).unwrap();
    let mut log = String::new();
    for line in std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap())) {
        log += &line.unwrap();
        if log.contains("accept connections") {
            break;
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    assert!(log.contains("accept connections") && !log.contains("FATAL"), "{log}");
}
