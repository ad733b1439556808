"use strict";
// The routes of openapi.json, each with the fields of its body.

const $ = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A schema in a few words.
function words(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const several = schema.anyOf ?? schema.oneOf;
  if (several) {
    const known = several.filter((one) => one.type !== "null").map(words);
    return [...new Set(known)].join(" or ");
  }
  if (schema.type === "array") return `list of ${words(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function fields(schema) {
  const table = element("table", "fields");
  const head = table.createTHead().insertRow();
  for (const name of ["field", "type", ""]) head.append(element("th", "", name));
  const rows = table.createTBody();
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = rows.insertRow();
    const must = schema.required?.includes(name) ? " (required)" : "";
    row.insertCell().append(element("code", "", name), must);
    row.insertCell().textContent = words(field);
    row.insertCell().textContent = field.description ?? "";
  }
  return table;
}

function route(path, method, described, schemas) {
  const made = element("details", "route card");
  const line = element("summary");
  line.append(element("span", "method", method.toUpperCase()), element("code", "", path));
  line.append(element("span", "hint", described.description ?? described.summary ?? ""));
  made.append(line);
  const schema = described.requestBody?.content?.["application/json"]?.schema;
  const name = schema?.$ref?.split("/").pop();
  made.append(name ? fields(schemas[name]) : element("p", "hint", "without a body"));
  return made;
}

async function begin() {
  try {
    const found = await (await fetch(`${location.origin}/openapi.json`)).json();
    for (const [path, methods] of Object.entries(found.paths)) {
      for (const [method, described] of Object.entries(methods)) {
        $("routes").append(route(path, method, described, found.components?.schemas ?? {}));
      }
    }
  } catch (error) {
    $("error").textContent = `openapi.json cannot be read: ${error.message}`;
    $("error").hidden = false;
  }
  document.body.classList.add("ready");
}

begin();
