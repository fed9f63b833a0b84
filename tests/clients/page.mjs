// The chat page in the distribution's Chromium, without a screen: types a question, reads the streamed answer, and
// uses the keyboard, the dark theme and the settings.
// usage: node page.mjs     BASE; NODE_MODULES holds puppeteer-core; CHROMIUM names the browser
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(process.env.NODE_MODULES + "/anchor.js");
const loaded = await import(pathToFileURL(from.resolve("puppeteer-core")));
const puppeteer = loaded.default ?? loaded;
const scripted = (process.env.SCRIPTED ?? "1") === "1";
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
});
try {
  const page = await browser.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => message.type() === "error" && faults.push(message.text()));
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
  const response = await page.goto(process.env.BASE + "/", { waitUntil: "load" });
  assert.equal(response.status(), 200);
  assert.match(response.headers()["content-security-policy"], /default-src 'none'/);
  const text = (id) => page.$eval("#" + id, (node) => node.textContent);
  await page.waitForFunction(() => document.getElementById("model").textContent.includes("context"));
  const dark = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.equal(dark, "rgb(20, 23, 26)");
  assert.equal(await page.$eval("#image", (node) => node.disabled), true);

  // The field has the focus: everything below is done with the keyboard.
  if (!scripted) await page.$eval("#tokens", (node) => { node.value = "24"; });
  await page.focus("#input");
  await page.keyboard.type("Say that the <b>probe</b> is done.");
  await page.keyboard.press("Enter");
  await page.waitForFunction(
    () => document.querySelector("article.assistant:not(.running) .text")?.textContent.length > 0,
    { timeout: 60000 },
  );
  const answer = await page.$eval("article.assistant:last-of-type", (node) => node.textContent);
  if (scripted) assert.match(answer, /All done: the probe finished\./);
  // What was typed is text on the page, not markup.
  assert.equal(await page.$$eval("article b", (nodes) => nodes.length), 0);
  assert.equal(await page.$eval("article.user .text", (node) => node.textContent), "Say that the <b>probe</b> is done.");
  if (scripted) {
    assert.equal(await page.$eval("article.assistant details", (node) => node.open), false, "thinking is folded");
  }
  assert.match(await text("prompt"), /\d+ tokens/);
  assert.match(await text("cached"), /\d+ \(\d+ %\)/);
  assert.match(await text("answer"), /\d+ tokens/);
  if (scripted) {
    await page.waitForFunction(() => document.getElementById("cause").textContent.includes("then differs"));
    assert.notEqual(await text("had"), await text("has"));
    assert.match(await text("cached"), /\((32|33) %\)/);
  }
  // The next turn carries the first; a new chat forgets both.
  await page.keyboard.type("Again.");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll("article.assistant:not(.running)").length === 2, {
    timeout: 60000,
  });
  await page.keyboard.down("Alt");
  await page.keyboard.press("n");
  await page.keyboard.up("Alt");
  assert.equal(await page.$$eval("article", (nodes) => nodes.length), 0);
  assert.deepEqual(faults, []);
  console.log("the page answers: " + answer.trim().slice(0, 80));
} finally {
  await browser.close();
}
