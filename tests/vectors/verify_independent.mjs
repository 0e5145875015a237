// Re-derive every value in the key-schema-2 vector files, from the specification alone.
//
// A third implementation of docs/spec/key-schema-2.md (encoder, refusals, decoder), on Node's own modules only. It shares
// no code with the Python ones: other string type (UTF-16), other integers (doubles and BigInt), other SHA-256.
//
//     node verify_independent.mjs FILE...
//
// Exit status: 0 when every value agrees, 1 at the first file with differences (each is printed with the case and the
// field), 2 when a file cannot be used at all. Numbers such as "9.7" are sections of the specification.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { basename } from "node:path";

const MAX_BYTES = 4096;
const MAX_POSITION = 2 ** 48; // all positions and sums stay below 2**53, so doubles are exact
const MAX_COUNT = { mm: 65_536, lora: 64, tag: 64 };
const REQUEST_LOCAL = /(^|:)renderer[0-9]+-mm-[0-9]+-[a-z_]+-[0-9]+$/; // without the m flag, $ is the very end
const RESOLVED_DTYPE = /^[a-z0-9_]+$/;
const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }); // a byte order mark is a character like others

class Refused extends Error {
  constructor(rule) {
    super(`refused by §${rule}`);
    this.rule = rule;
  }
}

class UnusableFile extends Error {}

const refuseIf = (condition, rule) => {
  if (condition) throw new Refused(rule);
};

// --- primitives (section 1) ------------------------------------------------------------------------------------------

const fixed = (size, write) => {
  const out = Buffer.alloc(size);
  write(out);
  return out;
};
const u8 = (value) => fixed(1, (out) => out.writeUInt8(value));
const u32 = (value) => fixed(4, (out) => out.writeUInt32LE(value));
const u64 = (value) => fixed(8, (out) => out.writeBigUInt64LE(BigInt(value)));
const i64 = (value) => fixed(8, (out) => out.writeBigInt64LE(BigInt(value)));
const framed = (value) => Buffer.concat([u32(value.length), value]);
const text = (value) => framed(Buffer.from(value, "utf8"));
const sha256 = (value) => createHash("sha256").update(value).digest();
const hex = (value) => value.toString("hex");

const unhex = (value) => {
  const out = Buffer.from(value, "hex"); // stops in silence at the first character that is not hex
  if (hex(out) !== value) throw new UnusableFile("has a string that should be lower-case hex and is not");
  return out;
};

// --- checks on the way in (sections 8 and 9) -------------------------------------------------------------------------

const checkedText = (value, { mayBeEmpty = false } = {}) => {
  refuseIf(typeof value !== "string", "9.1");
  refuseIf(value.length > MAX_BYTES, "9.2"); // no UTF-16 unit is shorter than one byte of UTF-8
  const encoded = Buffer.from(value, "utf8");
  refuseIf(encoded.toString("utf8") !== value, "9.3"); // a lone surrogate comes back as U+FFFD
  refuseIf(encoded.length > MAX_BYTES, "9.2");
  refuseIf(encoded.length === 0 && !mayBeEmpty, "9.4");
  return value;
};

const checkedInt = (value) => {
  refuseIf(!Number.isInteger(value), "9.1"); // also for booleans, strings and null
  return value;
};

const checkedPosition = (value) => {
  refuseIf(checkedInt(value) < 0 || value > MAX_POSITION, "9.7");
  return value;
};

const checkedRange = (start, size) => {
  refuseIf(checkedPosition(start) + checkedPosition(size) > MAX_POSITION, "9.7");
};

const checkedBytes = (value) => {
  refuseIf(typeof value !== "string", "9.1"); // bytes stand in the file as hex
  return unhex(value);
};

const SPACE_FIELDS = ["model", "chunk_size", "kv_dtype", "model_revision", "kv_layout", "attributes"];

const rootPreimage = (space) => {
  const unknown = Object.keys(space).filter((field) => !SPACE_FIELDS.includes(field));
  if (unknown.length) throw new UnusableFile(`space has unknown fields ${unknown}`);
  const { model, chunk_size: chunkSize, kv_dtype: kvDtype } = space;
  const { model_revision: revision = "", kv_layout: layout = "", attributes = {} } = space;
  checkedText(model);
  checkedText(revision, { mayBeEmpty: true });
  checkedText(kvDtype);
  refuseIf(kvDtype === "auto" || !RESOLVED_DTYPE.test(kvDtype), "9.5");
  refuseIf(checkedInt(chunkSize) < 1 || chunkSize >= 2 ** 31, "9.6");
  checkedText(layout, { mayBeEmpty: true });
  refuseIf(attributes === null || typeof attributes !== "object" || Array.isArray(attributes), "9.1");
  const pairs = Object.entries(attributes).map(([name, value]) => [
    text(checkedText(name)),
    text(checkedText(value, { mayBeEmpty: true })),
  ]);
  pairs.sort(([left], [right]) => Buffer.compare(left.subarray(4), right.subarray(4))); // by the name, not its length
  return Buffer.concat([
    ...["xk2/space", model, revision, kvDtype].map(text),
    u32(chunkSize),
    text(layout),
    u32(pairs.length),
    ...pairs.flat(),
  ]);
};

const checkedTokens = (tokens) => {
  refuseIf(!Array.isArray(tokens), "9.20");
  for (const token of tokens) refuseIf(!Number.isInteger(token), "9.18");
  for (const token of tokens) refuseIf(token < 0 || token >= 2 ** 32, "9.19");
  return tokens;
};

// Each kind: how many fields it has, and what one entry of the file becomes.
const EXTRA_KEYS = {
  mm: [3, (identifier, offset, length) => {
    refuseIf(REQUEST_LOCAL.test(checkedText(identifier)), "9.8");
    checkedRange(offset, length);
    return { kind: "mm", identifier, start: offset, length, stop: offset + length, same: [identifier, offset, length] };
  }],
  lora: [3, (name, revision, start) => {
    checkedText(name);
    checkedText(revision, { mayBeEmpty: true });
    return { kind: "lora", name, revision, start: checkedPosition(start), stop: Infinity, same: [name, revision] };
  }],
  salt: [1, (value) => ({ kind: "salt", value: checkedText(value), start: 0, stop: Infinity, same: [] })],
  embeds: [4, (start, rowsHex, rowBytes, dtype) => {
    const rows = checkedBytes(rowsHex);
    refuseIf(checkedInt(rowBytes) < 1 || rowBytes >= 2 ** 32 || rows.length % rowBytes !== 0, "9.9");
    checkedRange(start, rows.length / rowBytes);
    checkedText(dtype);
    return { kind: "embeds", rows, rowBytes, dtype, start, stop: start + rows.length / rowBytes };
  }],
  tag: [3, (name, valueHex, start) => {
    refuseIf(checkedText(name).startsWith("xk."), "9.17");
    const value = checkedBytes(valueHex);
    refuseIf(value.length > MAX_BYTES, "9.2");
    return { kind: "tag", name, value, start: checkedPosition(start), stop: Infinity, same: [name] };
  }],
};
const TWICE = { mm: "9.11", lora: "9.12", tag: "9.13", salt: "9.14" };

const mergedEmbeds = (ranges) => {
  const out = [];
  for (const range of ranges.filter(({ rows }) => rows.length).sort((left, right) => left.start - right.start)) {
    const last = out.at(-1);
    refuseIf(last && range.start < last.stop, "9.10");
    if (last && range.start === last.stop && range.rowBytes === last.rowBytes && range.dtype === last.dtype) {
      out[out.length - 1] = { ...last, rows: Buffer.concat([last.rows, range.rows]), stop: range.stop };
    } else {
      out.push(range);
    }
  }
  return out;
};

const checkedExtraKeys = (entries) => {
  const keys = entries.map(([kind, ...fields]) => {
    const [arity, check] = Object.hasOwn(EXTRA_KEYS, kind) ? EXTRA_KEYS[kind] : [-1];
    refuseIf(fields.length !== arity, "9.16");
    return check(...fields);
  });
  const ofKind = (kind) => keys.filter((key) => key.kind === kind);
  for (const [kind, most] of Object.entries(MAX_COUNT)) refuseIf(ofKind(kind).length > most, "9.15");
  for (const [kind, rule] of Object.entries(TWICE)) {
    const names = ofKind(kind).map(({ same }) => JSON.stringify(same));
    refuseIf(new Set(names).size !== names.length, rule);
  }
  return [...keys.filter(({ kind }) => kind !== "embeds"), ...mergedEmbeds(ofKind("embeds"))];
};

// --- parts, chunks, segments (sections 5, 6, 7) ----------------------------------------------------------------------

/** What a decoder must read back from the part of `key` in the chunk [start, stop). */
const fieldsIn = (key, start, stop) => {
  switch (key.kind) {
    case "mm":
      return ["mm", key.identifier, key.start - start, key.length];
    case "lora":
      return ["lora", key.name, key.revision, Math.max(0, key.start - start)];
    case "salt":
      return ["salt", key.value];
    case "tag":
      return ["tag", key.name, hex(key.value), Math.max(0, key.start - start)];
    default: {
      const [first, last] = [Math.max(key.start, start), Math.min(key.stop, stop)];
      const inside = key.rows.subarray((first - key.start) * key.rowBytes, (last - key.start) * key.rowBytes);
      const digest = sha256(Buffer.concat([text("xk2/embeds"), text(key.dtype), u32(key.rowBytes), inside]));
      return ["embeds", first - start, last - first, hex(digest)];
    }
  }
};

const PART_KINDS = { mm: 1, lora: 2, salt: 3, embeds: 4, tag: 5 };

const part = ([form, ...f]) => {
  const payload = {
    mm: () => [text(f[0]), i64(f[1]), u64(f[2])],
    lora: () => [text(f[0]), text(f[1]), u64(f[2])],
    salt: () => [text(f[0])],
    embeds: () => [u64(f[0]), u64(f[1]), framed(unhex(f[2]))],
    tag: () => [text(f[0]), framed(unhex(f[1])), u64(f[2])],
    unknown: () => [unhex(f[1])],
  }[form]();
  return Buffer.concat([u8(form === "unknown" ? f[0] : PART_KINDS[form]), framed(Buffer.concat(payload))]);
};

const deriveOne = (form, parent, tokens, keys, start) => {
  const stop = start + tokens.length;
  const pairs = keys
    .filter((key) => Math.max(key.start, start) < Math.min(key.stop, stop))
    .map((key) => fieldsIn(key, start, stop))
    .map((fields) => ({ fields, encoded: part(fields) }))
    .sort((left, right) => Buffer.compare(left.encoded, right.encoded));
  const parts = pairs.map(({ encoded }) => encoded);
  const packed = Buffer.alloc(4 * tokens.length);
  tokens.forEach((token, i) => packed.writeUInt32LE(token, 4 * i));
  const preimage = Buffer.concat([
    text(`xk2/${form}`), parent, u32(tokens.length), packed, u32(parts.length), ...parts,
  ]);
  const decoded = { form, parent: hex(parent), tokens, parts: pairs.map(({ fields }) => fields) };
  return { parts, preimage, digest: sha256(preimage), decoded };
};

const extraKeysOf = ({ extra_keys: given, repeated_extra_keys: repeated }) => {
  const filled = (i) => repeated.template.map((f) => (typeof f === "string" ? f.replaceAll("{i}", i) : f));
  return repeated ? [...given, ...Array.from({ length: repeated.count }, (_, i) => filled(i))] : given;
};

const deriveChunks = (vector) => {
  let parent = sha256(rootPreimage(vector.space));
  const tokens = checkedTokens(vector.tokens);
  const keys = checkedExtraKeys(extraKeysOf(vector));
  const size = vector.space.chunk_size;
  const chunks = [];
  for (let start = 0; start < tokens.length; start += size) {
    const piece = tokens.slice(start, start + size);
    if (piece.length < size && !vector.partial_tail) break;
    chunks.push(deriveOne("chunk", parent, piece, keys, start));
    parent = chunks.at(-1).digest;
  }
  return chunks;
};

const deriveSegment = (vector, tokens, start) => {
  const root = sha256(rootPreimage(vector.space));
  refuseIf(checkedTokens(tokens).length === 0, "9.21");
  checkedRange(start, tokens.length);
  return deriveOne("segment", root, tokens, checkedExtraKeys(extraKeysOf(vector)), start);
};

// --- decoder (section 11) --------------------------------------------------------------------------------------------

class Reader {
  constructor(data) {
    this.data = data;
    this.at = 0;
  }

  take(size) {
    refuseIf(size > this.data.length - this.at, "11.2");
    this.at += size;
    return this.data.subarray(this.at - size, this.at);
  }

  u32() {
    return this.take(4).readUInt32LE();
  }

  framed(most = Infinity) {
    const size = this.u32();
    refuseIf(size > most, "11.5");
    return this.take(size);
  }

  text({ mayBeEmpty = false } = {}) {
    const raw = this.framed(MAX_BYTES);
    refuseIf(raw.length === 0 && !mayBeEmpty, "11.6");
    try {
      return UTF8.decode(raw);
    } catch {
      throw new Refused("11.4");
    }
  }

  /** A position: u64 or i64, brought into the range where doubles are exact. */
  position(read = "readBigUInt64LE") {
    const value = this.take(8)[read]();
    refuseIf(value > BigInt(MAX_POSITION) || value < -BigInt(MAX_POSITION), "11.13");
    return Number(value);
  }

  end() {
    refuseIf(this.at !== this.data.length, "11.3");
  }
}

const decodeSpace = (reader) => {
  const model = reader.text();
  const revision = reader.text({ mayBeEmpty: true });
  const kvDtype = reader.text();
  const chunkSize = reader.u32();
  refuseIf(kvDtype === "auto" || !RESOLVED_DTYPE.test(kvDtype) || chunkSize < 1 || chunkSize >= 2 ** 31, "11.7");
  const layout = reader.text({ mayBeEmpty: true });
  const attributes = Object.create(null); // so that a name such as __proto__ is a name like others
  let last = Buffer.alloc(0);
  for (let left = reader.u32(); left > 0; left -= 1) {
    const name = reader.text();
    refuseIf(Buffer.compare(Buffer.from(name), last) <= 0, "11.8");
    last = Buffer.from(name);
    attributes[name] = reader.text({ mayBeEmpty: true });
  }
  return { model, model_revision: revision, kv_dtype: kvDtype, chunk_size: chunkSize, kv_layout: layout, attributes };
};

const decodeStart = (payload, nTokens) => {
  const start = payload.position();
  refuseIf(start >= nTokens, "11.12");
  return start;
};

const DECODERS = {
  1: (payload, nTokens) => {
    const identifier = payload.text();
    refuseIf(REQUEST_LOCAL.test(identifier), "11.18");
    const offset = payload.position("readBigInt64LE");
    const length = payload.position();
    refuseIf(Math.max(0, offset) + length > MAX_POSITION, "11.13");
    refuseIf(Math.max(0, offset) >= Math.min(nTokens, offset + length), "11.12");
    return ["mm", identifier, offset, length];
  },
  2: (payload, nTokens) => [
    "lora", payload.text(), payload.text({ mayBeEmpty: true }), decodeStart(payload, nTokens),
  ],
  3: (payload) => ["salt", payload.text()],
  4: (payload, nTokens) => {
    const [first, rows] = [payload.position(), payload.position()];
    const digest = payload.framed();
    refuseIf(first + rows > MAX_POSITION, "11.13");
    refuseIf(digest.length !== 32, "11.14");
    refuseIf(rows === 0 || first >= nTokens, "11.12");
    refuseIf(first + rows > nTokens, "11.15");
    return ["embeds", first, rows, hex(digest)];
  },
  5: (payload, nTokens) => {
    const name = payload.text();
    refuseIf(name.startsWith("xk."), "11.18");
    return ["tag", name, hex(payload.framed(MAX_BYTES)), decodeStart(payload, nTokens)];
  },
};

const IDENTITY = { lora: (f) => [f[1], f[2]], tag: (f) => [f[1]], salt: () => [] };

const decodeChunk = (reader) => {
  const parent = hex(reader.take(32));
  const nTokens = reader.u32();
  refuseIf(nTokens === 0, "11.9");
  const packed = reader.take(4 * nTokens);
  const tokens = Array.from({ length: nTokens }, (_, i) => packed.readUInt32LE(4 * i));
  const parts = [];
  let last = Buffer.alloc(0);
  for (let left = reader.u32(); left > 0; left -= 1) {
    const from = reader.at;
    const kind = reader.take(1)[0];
    const payload = new Reader(reader.framed());
    refuseIf(kind === 0 || kind >= 128, "11.10");
    const read = DECODERS[kind] ?? ((rest) => ["unknown", kind, hex(rest.take(rest.data.length))]);
    parts.push(read(payload, nTokens));
    payload.end();
    const encoded = reader.data.subarray(from, reader.at);
    refuseIf(Buffer.compare(encoded, last) <= 0, "11.11");
    last = encoded;
  }
  const ofKind = (form) => parts.filter(([name]) => name === form);
  for (const [form, most] of Object.entries(MAX_COUNT)) refuseIf(ofKind(form).length > most, "11.17");
  for (const [form, identity] of Object.entries(IDENTITY)) {
    const names = ofKind(form).map((fields) => JSON.stringify(identity(fields)));
    refuseIf(new Set(names).size !== names.length, "11.16");
  }
  const runs = ofKind("embeds").sort((left, right) => left[1] - right[1]);
  runs.slice(1).forEach((run, i) => refuseIf(run[1] < runs[i][1] + runs[i][2], "11.15"));
  const items = ofKind("mm");
  const earliest = items.reduce((least, [, , offset]) => Math.max(least, -offset), 0);
  const ends = [
    ...items.map(([, , offset, length]) => offset + length),
    ...runs.map(([, first, count]) => first + count),
    ...ofKind("lora").map((fields) => fields[3]),
    ...ofKind("tag").map((fields) => fields[3]),
  ];
  ends.forEach((end) => refuseIf(earliest + end > MAX_POSITION, "11.13"));
  return { parent, tokens, parts };
};

const decode = (data) => {
  for (const form of ["space", "chunk", "segment"]) {
    const tag = text(`xk2/${form}`);
    if (tag.equals(data.subarray(0, tag.length))) {
      const reader = new Reader(data.subarray(tag.length));
      const decoded = form === "space" ? decodeSpace(reader) : decodeChunk(reader);
      reader.end();
      return { form, ...decoded };
    }
  }
  throw new Refused("11.1");
};

// --- comparing with a file -------------------------------------------------------------------------------------------

/** One text for one value, whatever the order of an object's fields. */
const canonical = (value) => {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.keys(value).sort().map((k) => `${JSON.stringify(k)}:${canonical(value[k])}`).join(",")}}`;
};

const short = (shown) => (shown.length <= 200 ? shown : `${shown.slice(0, 160)}... (${shown.length} characters)`);

const CASE_FIELDS = [
  "name", "space", "tokens", "extra_keys", "repeated_extra_keys", "partial_tail", "root", "keys", "segment",
  "parts_of_chunks", "preimage_of_root", "preimage_of_chunk_0", "preimages",
];
const FILE_FIELDS = [
  "key_schema", "note", "provenance", "cases", "tunnel", "refusals", "accepted_preimages", "refused_preimages",
];

const onlyKnown = (object, known, what) => {
  const unknown = Object.keys(object).filter((field) => !known.includes(field));
  if (unknown.length) throw new UnusableFile(`${what} has fields that nobody checks: ${unknown}`);
};

class Checker {
  differences = [];
  values = 0;

  same(name, field, derived, given) {
    this.values += 1;
    const [left, right] = [derived, given].map((value) => (value === undefined ? "nothing" : canonical(value)));
    if (left !== right) this.differences.push(`${name}: ${field}: derived ${short(left)}, file has ${short(right)}`);
  }

  refused(name, rule, call) {
    this.values += 1;
    try {
      call();
    } catch (refusal) {
      if (!(refusal instanceof Refused)) throw refusal;
      this.same(name, "rule", refusal.rule, rule);
      return;
    }
    this.differences.push(`${name}: must be refused by §${rule}, and was accepted`);
  }

  decodesTo(name, field, preimage, wanted) {
    let decoded;
    try {
      decoded = decode(preimage);
    } catch (refusal) {
      if (!(refusal instanceof Refused)) throw refusal;
      this.differences.push(`${name}: ${field}: decoder refuses it by §${refusal.rule}`);
      return;
    }
    this.same(name, `${field}, decoded`, decoded, wanted);
  }

  vector(vector) {
    const { name } = vector;
    onlyKnown(vector, CASE_FIELDS, name);
    const root = rootPreimage(vector.space);
    this.same(name, "root", hex(sha256(root)), vector.root);
    const defaults = { model_revision: "", kv_layout: "", attributes: {} };
    this.decodesTo(name, "preimage_of_root", root, { form: "space", ...defaults, ...vector.space });
    const chunks = deriveChunks(vector);
    this.same(name, "keys", chunks.map(({ digest }) => hex(digest)), vector.keys);
    chunks.forEach((c, i) => this.decodesTo(name, `preimage of chunk ${i}`, c.preimage, c.decoded));
    const derived = {
      preimage_of_root: () => hex(root),
      parts_of_chunks: () => chunks.map(({ parts }) => parts.map(hex)),
      preimages: () => chunks.map(({ preimage }) => hex(preimage)),
      preimage_of_chunk_0: () => hex(chunks[0].preimage),
    };
    for (const [field, value] of Object.entries(derived)) {
      if (field in vector) this.same(name, field, value(), vector[field]);
    }
    if ("segment" in vector) this.segment(name, vector, vector.segment);
  }

  segment(name, vector, given) {
    onlyKnown(given, ["start", "stop", "key", "parts", "preimage"], `segment of ${name}`);
    const segment = deriveSegment(vector, vector.tokens.slice(given.start, given.stop), given.start);
    this.same(name, "segment key", hex(segment.digest), given.key);
    this.decodesTo(name, "preimage of the segment", segment.preimage, segment.decoded);
    if ("parts" in given) this.same(name, "segment parts", segment.parts.map(hex), given.parts);
    if ("preimage" in given) this.same(name, "segment preimage", hex(segment.preimage), given.preimage);
  }

  tunnel({ key, chunk_size: size, values: given }) {
    const values = [];
    for (let i = 0; values.length < size; i += 1) {
      const digest = sha256(Buffer.concat([text("xk2/tunnel"), unhex(key), u32(i)]));
      for (let at = 0; at < 32; at += 4) values.push(digest.readUInt32LE(at) & 0x7fffffff);
    }
    this.same("tunnel", "values", values.slice(0, size), given);
  }
}

const checkFile = (path) => {
  const content = JSON.parse(UTF8.decode(readFileSync(path)));
  onlyKnown(content, FILE_FIELDS, "the file");
  if (content.key_schema !== 2) throw new UnusableFile("is not a vector file of key schema 2");
  if (!content.cases?.length) throw new UnusableFile("has no cases");
  const checker = new Checker();
  for (const vector of content.cases) checker.vector(vector);
  for (const r of content.refusals ?? []) {
    checker.refused(r.name, r.rule, () =>
      "segment_start" in r ? deriveSegment(r, r.tokens, r.segment_start) : deriveChunks(r));
  }
  for (const { name, preimage, decoded } of content.accepted_preimages ?? []) {
    checker.decodesTo(name, "preimage", unhex(preimage), decoded);
    if (decoded.form !== "space") {
      checker.same(name, "parts, encoded again", preimage.endsWith(hex(Buffer.concat(decoded.parts.map(part)))), true);
    }
  }
  for (const { name, rule, preimage } of content.refused_preimages ?? []) {
    checker.refused(name, rule, () => decode(unhex(preimage)));
  }
  if ("tunnel" in content) checker.tunnel(content.tunnel);
  const lists = FILE_FIELDS.filter((field) => Array.isArray(content[field])).sort();
  const counts = lists.map((field) => `${content[field].length} ${field}`).join(", ");
  return { count: `${basename(path)}: ${counts}, ${checker.values} values compared`, differences: checker.differences };
};

const main = (paths) => {
  if (!paths.length) {
    process.stderr.write("usage: verify_independent.mjs FILE...\n");
    return 2;
  }
  for (const path of paths) {
    let result;
    try {
      result = checkFile(path);
    } catch (reason) {
      process.stderr.write(`${path}: cannot be checked: ${reason.name}: ${reason.message}\n`);
      return 2;
    }
    const { count, differences } = result;
    if (differences.length) {
      for (const difference of differences.slice(0, 20)) process.stderr.write(`${path}: ${difference}\n`);
      process.stderr.write(`${path}: ${differences.length} differences\n`);
      return 1;
    }
    process.stdout.write(`${count}\n`);
  }
  return 0;
};

process.exitCode = main(process.argv.slice(2));
