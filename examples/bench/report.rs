//! The rows as people and programs read them.

use crate::args::Output;
use crate::measure::Row;
use crate::memory::human;
use crate::peak;
use anyhow::Result;
use serde::Serialize;
use serde_json::{json, Value};
use std::io::Write;

/// What all rows have in common.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    pub gem: &'static str,
    pub device: String,
    pub machine: String,
    pub threads: usize,
    pub model: String,
    pub dtype: String,
}

pub fn print(out: &mut impl Write, output: Output, setting: &Setting, rows: &[Row]) -> Result<()> {
    match output {
        Output::Md => markdown(out, setting, rows)?,
        Output::Csv => csv(out, setting, rows)?,
        Output::Json => {
            let rows: Vec<Value> = rows.iter().map(value).collect();
            let all = json!({ "setting": setting, "peak_memory_bytes": peak::of_process(), "rows": rows });
            writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        }
        Output::Jsonl => {
            for row in rows {
                let mut row = value(row);
                row["setting"] = json!(setting);
                writeln!(out, "{row}")?;
            }
        }
    }
    Ok(())
}

/// A row with what follows from its samples.
fn value(row: &Row) -> Value {
    let mut value = json!(row);
    let (rate, deviation) = row.rate();
    value["median_ms"] = json!(row.median_ms());
    value["spread"] = json!(row.spread());
    value["per_second"] = json!(rate);
    value["per_second_deviation"] = json!(deviation);
    value["gigabytes_per_second"] = json!(row.gigabytes_per_second());
    value
}

fn markdown(out: &mut impl Write, setting: &Setting, rows: &[Row]) -> Result<()> {
    let Setting {
        machine,
        device,
        threads,
        model,
        dtype,
        ..
    } = setting;
    writeln!(
        out,
        "{model}, {dtype}, {device} of {machine}, {threads} threads\n"
    )?;
    writeln!(
        out,
        "| test | context | attention | t/s | median ms | ± % | x first | GB/s | planned memory | peak |"
    )?;
    writeln!(out, "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|")?;
    for row in rows {
        let (rate, deviation) = row.rate();
        let bandwidth = row
            .gigabytes_per_second()
            .map_or(String::new(), |x| format!("{x:.1}"));
        writeln!(
            out,
            "| {} | {} | {} | {rate:.2} ± {deviation:.2} | {:.3} | {:.1} | {:.3} ± {:.3} | {bandwidth} | {} | {} |",
            row.test,
            row.context,
            row.arm,
            row.median_ms(),
            100.0 * row.spread(),
            row.ratio,
            row.ratio * row.ratio_spread,
            human(row.planned_bytes),
            row.peak_bytes.map_or(String::new(), human)
        )?;
    }
    if let Some(bytes) = peak::of_process() {
        writeln!(out, "\npeak memory of the process: {}", human(bytes))?;
    }
    Ok(())
}

fn csv(out: &mut impl Write, setting: &Setting, rows: &[Row]) -> Result<()> {
    writeln!(out, "model,dtype,device,threads,test,context,attention,per_second,per_second_deviation,median_ms,spread,ratio,ratio_spread,gigabytes_per_second,planned_bytes,peak_bytes")?;
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    for row in rows {
        let (rate, deviation) = row.rate();
        let bandwidth = row
            .gigabytes_per_second()
            .map_or(String::new(), |x| x.to_string());
        writeln!(
            out,
            "{},{},{},{},{},{},{},{rate},{deviation},{},{},{},{},{bandwidth},{},{}",
            quoted(&setting.model),
            setting.dtype,
            setting.device,
            setting.threads,
            row.test,
            row.context,
            row.arm,
            row.median_ms(),
            row.spread(),
            row.ratio,
            row.ratio_spread,
            row.planned_bytes,
            row.peak_bytes.map_or(String::new(), |x| x.to_string())
        )?;
    }
    Ok(())
}
