//! `--config`: flags of `serve` from a TOML file. Every key is a flag's name. What the command line says wins: the file's
//! flags are put before it, without those that it says otherwise.

use crate::output::usage;
use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;

/// The command line with the flags of the configuration file that it names, if it is one of `serve`.
pub(crate) fn expand(arguments: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let Some(verb) = arguments.iter().position(|a| a == "serve") else { return Ok(arguments) };
    let rest = &arguments[verb + 1..];
    let command = command();
    let (mut file, mut said) = (None, Vec::new());
    for (i, argument) in rest.iter().enumerate() {
        let text = argument.to_string_lossy();
        if text == "--" {
            break;
        }
        if text == "--config" {
            file = rest.get(i + 1).cloned();
        } else if let Some(path) = text.strip_prefix("--config=") {
            file = Some(path.into());
        }
        said.extend(flag(&command, &text));
    }
    let Some(file) = file else { return Ok(arguments) };
    let flags = flags(&command, Path::new(&file))?;
    let mut expanded = arguments[..=verb].to_vec();
    for (name, flag) in flags {
        if !said.iter().any(|other| *other == name || excludes(&command, &name, other)) {
            expanded.push(flag);
        }
    }
    expanded.extend_from_slice(rest);
    Ok(expanded)
}

/// The long name of the flag that an argument of the command line is, also by another name of it or by its letter.
fn flag(command: &clap::Command, argument: &str) -> Option<String> {
    let name = argument.strip_prefix("--").map(|long| long.split_once('=').map_or(long, |(name, _)| name));
    let letter = argument.strip_prefix('-').and_then(|short| short.chars().next()).filter(|c| *c != '-');
    let known = command.get_arguments().find(|a| match name {
        Some(name) => {
            let aliases = a.get_all_aliases().unwrap_or_default();
            a.get_long() == Some(name) || aliases.contains(&name)
        }
        None => letter.is_some() && a.get_short() == letter,
    });
    known?.get_long().map(str::to_owned)
}

/// Whether two flags cannot be said together.
fn excludes(command: &clap::Command, one: &str, other: &str) -> bool {
    let find = |name: &str| command.get_arguments().find(|a| a.get_long() == Some(name));
    let (Some(one), Some(other)) = (find(one), find(other)) else { return false };
    let named = |a: &clap::Arg, b: &clap::Arg| {
        command.get_arg_conflicts_with(a).iter().any(|c| c.get_id() == b.get_id())
    };
    let grouped = command.get_groups().any(|group| {
        let members: Vec<&clap::Id> = group.get_args().collect();
        !group.clone().is_multiple() && members.contains(&one.get_id()) && members.contains(&other.get_id())
    });
    one.get_id() != other.get_id() && (named(one, other) || named(other, one) || grouped)
}

/// Flags that a file sets, to say of a complaint about one of them where it is set.
pub(crate) fn blame(file: &Path, complaint: &str) -> Option<String> {
    let names = flags(&command(), file).ok()?;
    let words: Vec<&str> = complaint.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
    let (name, _) = names.iter().find(|(name, _)| words.contains(&format!("--{name}").as_str()))?;
    Some(format!("{complaint} (--{name} may come from {})", file.display()))
}

/// The flags of a file, each with its name. What is wrong with a value by itself is found here.
fn flags(command: &clap::Command, path: &Path) -> anyhow::Result<Vec<(String, OsString)>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read"))?;
    let table: toml::Table = text.parse().map_err(|e| usage(format!("{shown}: {e}")))?;
    let mut out: Vec<(String, OsString)> = Vec::new();
    for (key, value) in table {
        let flag = if key == "model" { "config-model" } else { key.as_str() };
        let known = command.get_arguments().find(|a| a.get_long() == Some(flag));
        let Some(known) = known.filter(|_| key != "config" && key != "config-model") else {
            return Err(usage(format!("{shown}: there is no flag --{key}; keys are the flags of serve")));
        };
        let takes_value = known.get_action().takes_values();
        let mut push = |value: &toml::Value| -> anyhow::Result<()> {
            let text = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(n) => n.to_string(),
                toml::Value::Float(x) => x.to_string(),
                other => return Err(usage(format!("{shown}: {key} cannot be {}", other.type_str()))),
            };
            out.push((flag.to_owned(), format!("--{flag}={text}").into()));
            Ok(())
        };
        match (&value, takes_value) {
            (toml::Value::Boolean(true), false) => out.push((flag.to_owned(), format!("--{flag}").into())),
            (toml::Value::Boolean(false), false) => {}
            (toml::Value::Array(list), true) => list.iter().try_for_each(push)?,
            (value, true) => push(value)?,
            (_, false) => return Err(usage(format!("{shown}: {key} must be true or false"))),
        }
    }
    let alone =
        ["infernix", "serve"].map(OsString::from).into_iter().chain(out.iter().map(|(_, f)| f.clone()));
    match crate::args::Cli::try_parse_from(alone) {
        // What is missing may be on the command line.
        Err(error) if error.kind() != clap::error::ErrorKind::MissingRequiredArgument => {
            let text = error.to_string();
            let lines = text.lines().take_while(|l| !l.is_empty()).map(str::trim);
            let text = lines.collect::<Vec<_>>().join(" ");
            Err(usage(format!("{shown}: {}", text.trim_start_matches("error: "))))
        }
        _ => Ok(out),
    }
}

fn command() -> clap::Command {
    let mut root = crate::args::Cli::command();
    root.build();
    root.find_subcommand("serve").cloned().unwrap_or_default()
}

/// `infernix.example.toml`: every flag with its default.
pub(crate) fn example() -> String {
    let mut page = String::from(
        "# Configuration of `infernix serve --config FILE`. Generated by `infernix gen config`; do not edit.\n\
         # Every key is a flag of the same name; flags of the command line win over this file.\n\
         # Lines without a value show what kind of value there is; those with one show the default.\n\n\
         # Artifact, checkpoint folder or GGUF file\n# model = \"PATH\"\n",
    );
    let command = command();
    let mut heading = None;
    let skip = ["help", "version", "config", "config-model", "progress"];
    for arg in command.get_arguments().filter(|a| !a.is_hide_set()) {
        let Some(long) = arg.get_long().filter(|l| !skip.contains(l)) else { continue };
        let new = arg.get_help_heading();
        if new != heading {
            heading = new;
            if let Some(text) = new {
                let _ = write!(page, "\n# ---- {text}\n");
            }
        }
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let values: Vec<String> = arg
            .get_possible_values()
            .iter()
            .filter(|v| !v.is_hide_set())
            .map(|v| v.get_name().to_owned())
            .collect();
        let choices = if arg.get_action().takes_values() && !values.is_empty() {
            format!(": {}", values.join(", "))
        } else {
            String::new()
        };
        let _ = write!(page, "\n# {help}{choices}\n# {long} = {}\n", shown_value(arg));
    }
    page
}

/// The default, or the value's name.
fn shown_value(arg: &clap::Arg) -> String {
    if !arg.get_action().takes_values() {
        return "false".to_owned();
    }
    let quoted = |text: &str| {
        let plain = text.parse::<f64>().is_ok();
        if plain { text.to_owned() } else { toml::Value::from(text).to_string() }
    };
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|v| quoted(&v.to_string_lossy())).collect();
    if let [one] = defaults.as_slice() {
        return one.clone();
    }
    let name =
        arg.get_value_names().and_then(|n| n.first()).map_or_else(|| "VALUE".to_owned(), ToString::to_string);
    let value = toml::Value::from(name).to_string();
    if matches!(arg.get_action(), clap::ArgAction::Append) { format!("[{value}]") } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command, ServeArgs};

    fn parsed(config: &str, more: &[&str]) -> anyhow::Result<ServeArgs> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("serve.toml");
        std::fs::write(&file, config)?;
        let flag = format!("--config={}", file.display());
        let line: Vec<OsString> =
            ["infernix", "serve", &flag].iter().chain(more).map(|a| OsString::from(*a)).collect();
        match Cli::try_parse_from(expand(line)?)?.command {
            Command::Serve(args) => Ok(*args),
            other => anyhow::bail!("{other:?}"),
        }
    }

    #[test]
    fn a_file_sets_flags_and_the_command_line_wins() {
        let config = "port = 9000\nhost = \"::1\"\ncors = true\nno-thinking = false\nallow-host = [\"a\", \"b\"]\n\
                      temperature = 0.5\nmodel = \"m.infernix\"\n";
        let args = parsed(config, &["--port", "9001"]).expect("valid");
        assert_eq!((args.http.port, args.http.host.as_str()), (9001, "::1"));
        assert!(args.access.cors && !args.answers.no_thinking);
        assert_eq!(args.access.allow_host, ["a", "b"]);
        assert_eq!(args.sampling.temperature, Some(0.5));
        assert_eq!(args.config_model.as_deref(), Some(Path::new("m.infernix")));
    }

    #[test]
    fn what_the_command_line_says_wins_over_what_it_excludes_in_the_file() {
        let args = parsed("lossless = true\n", &["--backend", "cpu"]).expect("valid");
        assert_eq!((args.model.lossless, args.model.backend.as_str()), (false, "cpu"));
        let args = parsed("backend = \"cpu\"\n", &["--lossless"]).expect("valid");
        assert_eq!((args.model.lossless, args.model.backend.as_str()), (true, "auto"));
        let args = parsed("lossless = true\n", &["--device=cpu"]).expect("valid");
        assert!(!args.model.lossless, "by another name");
        let args = parsed("a8-activations = true\n", &["--a16-activations"]).expect("valid");
        assert!(args.model.activations.a16_activations && !args.model.activations.a8_activations);
        let args = parsed("prefix-cache-file = \"x\"\n", &["--no-prefix-cache"]).expect("valid");
        assert!(args.sched.no_prefix_cache && args.sched.prefix_cache_file.is_none());
        let args = parsed("no-prefix-cache = true\n", &["--prefix-cache-file", "x"]).expect("valid");
        assert!(!args.sched.no_prefix_cache && args.sched.prefix_cache_file.is_some());
        let args = parsed("allow-host = [\"a\", \"b\"]\nthreads = 3\n", &["--allow-host", "c", "-j4"])
            .expect("valid");
        assert_eq!((args.access.allow_host, args.model.threads), (vec!["c".to_owned()], Some(4)));
        // What the file's flag needs may be on the command line.
        let args = parsed("request-log-max-mib = 5\n", &["--request-log-jsonl", "x"]).expect("valid");
        assert_eq!(args.log.request_log_max_mib, Some(5));
    }

    #[test]
    fn a_complaint_about_a_value_of_the_file_names_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("serve.toml");
        std::fs::write(&file, "temperature = 500\nkv-capacity = 3\n").expect("written");
        let told = blame(&file, "--temperature must lie in 0..=100").expect("known");
        assert!(told.contains("serve.toml") && told.starts_with("--temperature must lie"), "{told}");
        assert_eq!(blame(&file, "--kv must lie in 0..=100"), None);
    }

    #[test]
    fn mistakes_are_named() {
        for (config, words) in [
            ("colour = 1", "no flag --colour"),
            ("cors = \"yes\"", "cors must be true or false"),
            ("port = { a = 1 }", "port cannot be table"),
            ("config = \"x\"", "no flag --config"),
            ("port = ", "serve.toml"),
            ("port = 99999", "serve.toml: invalid value '99999' for '--port"),
            ("kv-dtype = \"zzz\"", "serve.toml: invalid value 'zzz'"),
            ("lossless = true\nbackend = \"cpu\"", "serve.toml: the argument"),
        ] {
            let error = parsed(config, &[]).expect_err("refused").to_string();
            assert!(error.contains(words), "{config}: {error}");
        }
    }

    #[test]
    fn the_example_is_toml_of_known_flags() {
        let text = example();
        let all: String = text
            .lines()
            .filter_map(|l| l.strip_prefix("# "))
            .filter(|l| l.split_once(" = ").is_some_and(|(k, _)| !k.contains(' ')))
            .map(|l| format!("{l}\n"))
            .collect();
        let table: toml::Table = all.parse().expect("TOML");
        assert!(table.len() > 50 && table.contains_key("max-context") && table.contains_key("spec"));
    }
}
