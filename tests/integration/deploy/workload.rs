//! The workload that runs Tandem agrees with the code: variables, ports, probes, and the time to drain.

use std::collections::BTreeMap;

use clap::CommandFactory;
use serde_json::{Value, json};
use tandem::knobs::{Environment, Knobs};

use super::{ALL, documented, gateways, list, object, rendered, variables, word};

/// For the last spans after the drain (`tandem serve` waits no longer), and for a slow node.
const AFTER_DRAIN: u64 = 5 + 10;

#[test]
fn variables_exist_and_hold_what_they_may() {
    let documented = documented();
    assert!(documented.len() > 50, "{documented:?}");
    for (group, _, container) in gateways() {
        for name in variables(container).keys() {
            assert!(documented.contains_key(*name), "{group}: no such variable: {name}");
        }
        // A replica without a name of its own would share its place in Redis with the others.
        let named = list(&container["env"]).iter().find(|entry| entry["name"] == "POD_NAME");
        assert_eq!(
            named.map(|entry| &entry["valueFrom"]["fieldRef"]["fieldPath"]),
            Some(&json!("metadata.name")),
            "{group}"
        );
    }
    let (_, _, container) = &gateways()[0];
    let listed = list(&container["env"]);
    // The overlay for AIBrix patches by place.
    assert_eq!(listed[0]["name"], "REDIS_PASSWORD");
}

struct Given(BTreeMap<String, String>);

impl Environment for Given {
    fn get(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

#[test]
fn the_reader_of_variables_accepts_them_without_a_warning() {
    let read = |mut values: BTreeMap<String, String>, group: &str| {
        // What comes from the pod or a Secret.
        values.insert("POD_NAME".to_owned(), "gateway-1".to_owned());
        values.insert("REDIS_PASSWORD".to_owned(), "secret".to_owned());
        let (_, report) = Knobs::read(&Given(values)).unwrap_or_else(|refusal| panic!("{group}: {refusal}"));
        report.warnings
    };
    for (group, _, container) in gateways() {
        let literal =
            variables(container).into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
        let literal: BTreeMap<_, _> = literal.collect();
        assert_eq!(read(literal.clone(), &group), Vec::<String>::new(), "{group}");
        let misspelt = literal.into_iter().map(|(name, value)| (name.replace("_DRAIN_", "_DRIAN_"), value)).collect();
        assert_eq!(read(misspelt, &group).len(), 2, "a misspelt name is noticed");
    }
}

#[test]
fn arguments_and_ports_are_those_of_the_program() {
    let program = tandem::cli::Cli::command();
    let serve = program.find_subcommand("serve").expect("serve").clone();
    let default = |flag: &str| {
        let argument = serve.get_arguments().find(|argument| argument.get_long() == Some(flag)).expect(flag);
        argument.get_default_values()[0].to_str().expect("text").trim_start_matches(':').to_owned()
    };
    let expected = json!([
        {"name": "gateway", "containerPort": default("grpc-bind-address").parse::<u16>().unwrap()},
        {"name": "metrics", "containerPort": default("http-bind-address").parse::<u16>().unwrap()},
    ]);
    for (group, _, container) in gateways() {
        assert_eq!(container["ports"], expected, "{group}");
        assert!(container["command"].is_null(), "{group}: the image's entry point");
        let arguments = list(&container["args"]).iter().map(word);
        let parsed = program.clone().try_get_matches_from(std::iter::once("tandem").chain(arguments));
        assert!(parsed.is_ok(), "{group}: {parsed:?}");
    }
    for service in ["tandem-gateway", "tandem"] {
        let ports = &object(&rendered().kustomize[ALL], "Service", service)["spec"]["ports"];
        let numbers: Vec<_> = list(ports).iter().map(|port| (&port["name"], &port["port"])).collect();
        assert_eq!(numbers, [(&json!("gateway"), &json!(50052)), (&json!("metrics"), &json!(8080))]);
    }
    let headless = object(&rendered().kustomize[ALL], "Service", "tandem");
    assert_eq!(headless["spec"]["clusterIP"], "None");
    assert!(headless["spec"]["publishNotReadyAddresses"].is_null(), "a replica that drains leaves DNS");
}

#[test]
fn r91_the_grace_period_covers_the_drain() {
    for (group, workload, container) in gateways() {
        let variables = variables(container);
        let number = |name: &str| variables[name].expect(name).parse::<u64>().expect(name);
        let (notice, drain) = (number("TANDEM_DRAIN_PROPAGATION_SECONDS"), number("TANDEM_DRAIN_TIMEOUT_SECONDS"));
        let pod = &workload["spec"]["template"]["spec"];
        let grace = pod["terminationGracePeriodSeconds"].as_u64().expect("a grace period");
        assert!(grace >= notice + drain + AFTER_DRAIN, "{group}: {grace} s for {notice} s and {drain} s");
        // Nothing may run before SIGTERM that eats of it.
        assert!(container["lifecycle"].is_null(), "{group}");
        // Envoy and the kubelet have to notice while the replica still serves.
        let probe = &container["readinessProbe"];
        let noticed = probe["periodSeconds"].as_u64().unwrap() * probe["failureThreshold"].as_u64().unwrap();
        assert!(noticed < notice, "{group}: {noticed} s");
        let started = &container["startupProbe"];
        assert!(started["periodSeconds"].as_u64().unwrap() * started["failureThreshold"].as_u64().unwrap() >= 30);
        let paths =
            ["startupProbe", "readinessProbe", "livenessProbe"].map(|probe| container[probe]["httpGet"].clone());
        let http = |path: &str| json!({"path": path, "port": "metrics"});
        assert_eq!(paths, [http("/healthz"), http("/readyz"), http("/healthz")], "{group}");
    }
}

#[test]
fn r91_a_roll_out_never_takes_a_replica_away_before_another_serves() {
    for (group, workload, _) in gateways() {
        let spec = &workload["spec"];
        assert!(spec["replicas"].as_u64().is_some_and(|replicas| replicas >= 3), "{group}");
        if workload["kind"] == "Deployment" {
            assert_eq!(
                spec["strategy"],
                json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}),
                "{group}"
            );
        }
        let pod = &spec["template"]["spec"];
        assert!(pod["affinity"]["podAntiAffinity"].is_object(), "{group}");
        assert_eq!(pod["topologySpreadConstraints"][0]["topologyKey"], "topology.kubernetes.io/zone", "{group}");
    }
    let objects = &rendered().kustomize[ALL];
    let scaler = object(objects, "HorizontalPodAutoscaler", "tandem-gateway");
    let deployment = object(objects, "Deployment", "tandem-gateway");
    assert_eq!(scaler["spec"]["minReplicas"], deployment["spec"]["replicas"]);
    assert_eq!(scaler["spec"]["scaleTargetRef"]["name"], deployment["metadata"]["name"]);
    // The next one may go when the last one has had its time.
    let down = &scaler["spec"]["behavior"]["scaleDown"]["policies"][0];
    let grace = &deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"];
    assert!(down["periodSeconds"].as_u64() >= grace.as_u64(), "{down} {grace}");
}

#[test]
fn the_memory_limit_covers_what_may_be_held() {
    let documented = documented();
    let budget: u64 = ["TANDEM_MAX_BUFFERED_BYTES", "TANDEM_PREFIX_CACHE_BYTES"]
        .iter()
        .map(|name| documented[*name].parse::<u64>().expect(name))
        .sum();
    for (group, _, container) in gateways() {
        for name in ["TANDEM_MAX_BUFFERED_BYTES", "TANDEM_PREFIX_CACHE_BYTES"] {
            assert!(!variables(container).contains_key(name), "{group}: this test assumes the default of {name}");
        }
        let limit = super::bytes(&container["resources"]["limits"]["memory"]);
        assert!(limit >= budget + (1 << 30), "{group}: {limit} for {budget}");
        assert_eq!(
            container["resources"]["limits"]["cpu"],
            Value::Null,
            "{group}: throttling costs more than it saves"
        );
    }
}

#[test]
fn numbered_replicas_have_a_machine_id_each() {
    let objects = &rendered().helm["numbered"];
    let workload = object(objects, "StatefulSet", "tandem-gateway");
    object(objects, "Service", word(&workload["spec"]["serviceName"]));
    let container = &workload["spec"]["template"]["spec"]["containers"][0];
    let id = list(&container["env"]).iter().find(|entry| entry["name"] == "AIBRIX_TRT_MACHINE_ID").expect("an id");
    assert_eq!(id["valueFrom"]["fieldRef"]["fieldPath"], "metadata.labels['apps.kubernetes.io/pod-index']");
    assert_eq!(word(&container["image"]), "registry.example/tandem:1");
}
