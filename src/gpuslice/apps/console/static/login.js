// Asks for a bearer token. It is held in this tab alone.
import { copyable, h, replace } from "./dom.js";
import { store } from "./store.js";
import { t } from "./words.js";

/** Resolves when a token has been given; whether the cluster knows it is seen by the next question. */
export function showLogin(main) {
  const wrong = Boolean(store.token);
  store.token = "";
  store.health = null; // what another token may see
  sessionStorage.removeItem("gpuslice.token");
  return new Promise((resolve) => {
    const input = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: true });
    const form = h(
      "form.panel.login",
      { onsubmit: (event) => { event.preventDefault(); store.token = input.value.trim(); sessionStorage.setItem("gpuslice.token", store.token); resolve(); } },
      h("div.inside", {},
        h("h1", {}, t("tokenGo")),
        h("p.muted", {}, t("tokenText")),
        wrong ? h("p.tag.bad", { role: "alert" }, t("tokenWrong")) : null,
        h("label", { for: "token" }, t("token")),
        input,
        h("button.primary", { type: "submit" }, t("tokenGo")),
        h("p.muted.small", {}, t("tokenHow")),
        copyable("kubectl -n default create token default"),
      ),
    );
    replace(main, form);
    input.focus();
  });
}
