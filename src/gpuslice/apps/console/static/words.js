// The page's own words. What the cluster says of a pod comes in English, as `gpuslice explain` prints it.
const WORDS = {
  en: {
    cards: "Cards", waiting: "Waiting", teams: "Teams", health: "Health", pod: "Pod",
    copy: "copy", copied: "copied", search: "Find a node, pod or namespace", theme: "Theme", language: "中文",
    skip: "Skip to content", light: "light", dark: "dark", auto: "system",
    allocated: "Allocated", used: "Used", waitingPods: "Waiting pods", cardsInUse: "Cards in use", outOfUse: "Out of use",
    of: "of {0}", free: "free", team: "Team", use: "Use", colourBy: "Colour by", wall: "Wall", table: "Table",
    node: "Node", card: "Card", oneUnit: "1 unit", manyUnits: "{0} units", memory: "Memory", model: "Model", namespace: "Namespace", state: "State",
    allNodes: "All nodes", others: "pods that you may not see", notReady: "not ready", cordoned: "cordoned", sick: "out of use",
    nothingShared: "No node shares its cards", nothingSharedText: "Label a node that has cards: its agent then offers parts of them.",
    noPods: "No pod holds a part of a card yet", noPodsText: "Request memory of a card in a pod's limits, and the pod appears here.",
    noWaiting: "No pod is waiting", noWaitingText: "Every pod that requested a part of a card has it and is running.",
    notPlaced: "Waits for a card", notStarted: "Has its card, but does not run", since: "For", asks: "Asks for", why: "Why",
    wouldHelp: "What would help", never: "never fits", pods: "{0} pods", places: "{0} places", onePod: "1 pod", showAll: "show all {0}", theSame: "The same in a terminal",
    way: "Progress", created: "created", decided: "decided", bound: "bound", allocatedStep: "allocated", started: "started", notYet: "not yet", done: "done",
    limit: "limit", borrowed: "borrowed", peak: "peak", refused: "refused", throttled: "throttled", sm: "SMs", neighbours: "Other pods on its card", nobody: "nobody",
    toSay: "Details", events: "Events", noEvents: "No events: a cluster keeps them for an hour or so.", lastHour: "Memory in the last hour", noHistory: "Nothing measured yet.",
    fromMemory: "read from the exporters, since the console started", fromPrometheus: "from Prometheus",
    suggested: "Suggested size", suggestedMore: "at least {0}", noSuchPod: "There is no such pod", noSuchPodText: "It has ended, never shared a card, or you may not list it.",
    whyNot: "Why no node takes it", mostFree: "Most free on one card", nodes: "Nodes", held: "Held", unused: "Held, not used", idle: "Idle", quota: "Quota", of_claims: "claims", of_devices: "devices",
    giveBack: "Could give back", podsColumn: "Pods", noTeams: "No namespace holds a card", noTeamsText: "This page shows how much each namespace holds.",
    advice: "Advice", resize: "Pods that ask for too much or too little", emptyCards: "Cards that moving pods would empty", noAdvice: "Nothing to advise: no pod asks for much more than it used.",
    adviceRisk: "Peaks cover only the measured time. Check what a pod does before you shrink it: it may need more later.",
    now: "Now", suggestedShort: "Better", moves: "Moves", to: "to", noUsage: "Usage is not known: {0}", 
    healthy: "Nothing is wrong", healthyText: "Labels, resources, device plugins, annotations, extender and webhook were checked.", error: "error", warning: "warning", note: "note", errors: "errors", warnings: "warnings", notes: "notes",
    toDo: "To do", cardsOut: "Cards out of use", reason: "Reason", partOnly: "You may not list all nodes and pods: only findings of your own pods are shown.",
    notLooked: "Only {0} checks certificates and kube-scheduler's own configuration.",
    lost: "The console does not answer. What you see is {0} old; the console is retrying.", apiLost: "The API server cannot be read ({0}). What you see may be out of date.",
    noNodes: "You may not list nodes: the wall of cards is not shown.", reading: "The cluster is being read …", live: "live", restarts: "restarts",
    token: "Bearer token", tokenText: "Enter a token of this cluster. You see what it may list; it stays in this browser tab.", tokenGo: "Show the cluster", tokenWrong: "The cluster does not accept this token.",
    tokenHow: "A token of a service account", unknown: "unknown", wants: "{0} of one card", wantsMany: "{0} on each of {1} cards", idleSince: "idle for {0}", keys: "Arrow keys move, Enter opens, Escape goes back, / searches, 1 to 5 choose a view.",
    whatIfAll: "If all {0} pods were placed again, each would have a card: the free memory is there, but fragmented.", whatIfSome: "If all {1} pods were placed again, {0} would have a card; now {2} do.", whatIfMore: "{0} more nodes of the same kinds would hold everything that can fit.", whatIfNever: "{0} can never fit, whatever is added.", whatIfMany: "{0} pods are too many to place again here; use the command.",
    hours: "GiB-hours held", hoursUsed: "used", smHours: "SM-hours", hoursOf: "GiB-hours and SM-hours are of the last {0}.", busy: "SMs in the last hour", refusedMark: "memory was refused", alerts: "Alerts", pending: "pending", firing: "firing", noAlerts: "No Prometheus alert is firing.", critical: "critical", info: "info", cure: "What to do",
    held2: "{0} of {1} held", cardLabel: "Card {0}", closePanel: "Close", unitsUsed: "{0} used", matches: "{0} match", more: "{0} more", compute: "{0} % of its compute", measured: "measured {0} ago", perf: "Use", waste: "Waste", throttledMark: "compute was throttled", ago: "{0} ago", soon: "at once", nothingFound: "Nothing matches “{0}”", again: "again {0} ×, last {1} ago", cardOf: "card {0}", command: "Command", notRead: "The cluster cannot be read", ownNamespace: "Where you may list the pods of one namespace alone:", whyHidden: "You may not list nodes, so why is not told here.", byPod: "by pod", ofHeld: "{0} of what is held", excess: "Used beyond the request", beyond: "+{0}", owner: "Owner", neverUsed: "nothing: never used", noLimit: "none: nothing limits it", whyThey: "why", filled: "full: used, pale: held, narrow: borrowed", closed: "takes no pods",
  },
  zh: {
    cards: "显卡", waiting: "等待", teams: "团队", health: "健康", pod: "Pod",
    copy: "复制", copied: "已复制", search: "查找节点、Pod 或命名空间", theme: "主题", language: "English",
    skip: "跳到内容", light: "浅色", dark: "深色", auto: "系统",
    allocated: "已分配", used: "已使用", waitingPods: "等待的 Pod", cardsInUse: "使用中的显卡", outOfUse: "停用",
    of: "共 {0}", free: "空闲", team: "团队", use: "使用率", colourBy: "着色", wall: "卡墙", table: "表格",
    node: "节点", card: "显卡", oneUnit: "1 个单位", manyUnits: "{0} 个单位", memory: "显存", model: "型号", namespace: "命名空间", state: "状态",
    allNodes: "全部节点", others: "您无权查看的 Pod", notReady: "未就绪", cordoned: "已隔离", sick: "停用",
    nothingShared: "没有节点共享显卡", nothingSharedText: "给有显卡的节点打上标签，该节点的代理就会提供显卡切片。",
    noPods: "还没有 Pod 占用显卡切片", noPodsText: "在 Pod 的 limits 中申请显存，它就会出现在这里。",
    noWaiting: "没有等待的 Pod", noWaitingText: "每个申请显卡切片的 Pod 都已得到并在运行。",
    notPlaced: "等待显卡", notStarted: "已有显卡但未运行", since: "已等待", asks: "申请", why: "原因",
    wouldHelp: "怎样解决", never: "永远放不下", pods: "{0} 个 Pod", places: "{0} 处", onePod: "1 个 Pod", showAll: "显示全部 {0} 个", theSame: "终端中的同样内容",
    way: "经过", created: "创建", decided: "选卡", bound: "绑定", allocatedStep: "分配", started: "启动", notYet: "尚未", done: "完成",
    limit: "上限", borrowed: "借用", peak: "峰值", refused: "被拒", throttled: "限速", sm: "算力", neighbours: "同卡的 Pod", nobody: "没有",
    toSay: "说明", events: "事件", noEvents: "没有事件：集群通常只保留一小时。", lastHour: "最近一小时显存", noHistory: "尚无测量。",
    fromMemory: "来自 Exporter，控制台启动后保存", fromPrometheus: "来自 Prometheus",
    suggested: "建议大小", suggestedMore: "至少 {0}", noSuchPod: "没有这个 Pod", noSuchPodText: "它已结束、从未共享显卡，或您无权查看。",
    whyNot: "为什么没有节点能放下", mostFree: "单卡最大空闲", nodes: "节点", held: "占用", unused: "占而未用", idle: "闲置", quota: "配额", of_claims: "个申领", of_devices: "个设备",
    giveBack: "可归还", podsColumn: "Pod", noTeams: "没有命名空间占用显卡", noTeamsText: "谁占用多少会显示在这里。",
    advice: "建议", resize: "申请过多或过少的 Pod", emptyCards: "移动 Pod 可腾空的显卡", noAdvice: "没有建议：没有 Pod 的申请远超其使用。",
    adviceRisk: "峰值只代表测量期间。更改之前请确认负载将来不会更大。",
    now: "现在", suggestedShort: "更合适", moves: "移动", to: "到", noUsage: "无法得知使用量：{0}",
    healthy: "一切正常", healthyText: "已检查标签、资源、设备插件、注解、调度器扩展和 webhook。", error: "错误", warning: "警告", note: "提示", errors: "错误", warnings: "警告", notes: "提示",
    toDo: "处理", cardsOut: "停用的显卡", reason: "原因", partOnly: "您无权列出全部节点和 Pod：只显示您的 Pod 的检查结果。",
    notLooked: "证书和 kube-scheduler 的配置只由 {0} 检查。",
    lost: "控制台没有响应。所见为 {0} 前的内容；正在重试。", apiLost: "无法读取 API server（{0}）。所见可能已过时。",
    noNodes: "您无权列出节点：不显示卡墙。", reading: "正在读取集群 …", live: "实时", restarts: "重启",
    token: "Bearer token", tokenText: "请出示本集群的 token。您只看到它有权列出的内容；它只保存在此标签页。", tokenGo: "显示集群", tokenWrong: "集群不认识这个 token。",
    tokenHow: "服务账号的 token", unknown: "未知", wants: "单卡 {0}", wantsMany: "{1} 张卡各 {0}", idleSince: "已闲置 {0}", keys: "方向键移动，Enter 打开，Esc 返回，/ 搜索，1 到 5 切换视图。",
    whatIfAll: "若重新放置全部 {0} 个 Pod，每个都能得到显卡：空闲显存足够，但是零散。", whatIfSome: "若重新放置全部 {1} 个 Pod，有 {0} 个能得到显卡；现在有 {2} 个。", whatIfMore: "再加 {0} 个同类节点，就能放下所有放得下的 Pod。", whatIfNever: "{0} 个无论如何都放不下。", whatIfMany: "{0} 个 Pod 太多，无法在此重新放置；请用命令。",
    hours: "占用 GiB 小时", hoursUsed: "已用", smHours: "SM 小时", hoursOf: "GiB 小时和 SM 小时统计最近 {0}。", busy: "最近一小时算力", refusedMark: "显存被拒", alerts: "告警", pending: "待定", firing: "触发", noAlerts: "Prometheus 没有告警。", critical: "严重", info: "信息", cure: "处理",
    held2: "占用 {0}，共 {1}", cardLabel: "显卡 {0}", closePanel: "关闭", unitsUsed: "已用 {0}", matches: "{0} 个匹配", more: "还有 {0} 个", compute: "算力 {0} %", measured: "{0} 前测量", perf: "使用率", waste: "浪费", throttledMark: "算力被限速", ago: "{0} 前", soon: "立即", nothingFound: "没有匹配“{0}”的内容", again: "又启动 {0} 次，上次 {1} 前", cardOf: "显卡 {0}", command: "命令", notRead: "无法读取集群", ownNamespace: "如果您只能列出一个命名空间的 Pod：", whyHidden: "您无权列出节点，因此这里不说明原因。", byPod: "按 Pod", ofHeld: "占用的 {0}", excess: "超出申请的使用", beyond: "+{0}", owner: "所有者", neverUsed: "不需要：从未使用", noLimit: "无：没有任何限制", whyThey: "原因", filled: "实色：已使用，淡色：已占用，窄条：借用", closed: "不接收 Pod",
  },
};

let language = "en";

export function setLanguage(name) {
  language = name in WORDS ? name : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

export function currentLanguage() {
  return language;
}

export function t(key, ...values) {
  const text = WORDS[language][key] ?? WORDS.en[key] ?? key;
  return text.replace(/\{(\d)\}/g, (_, index) => values[index]);
}

export function languages() {
  return WORDS;
}

/** A span of seconds in words: 40 s, 12 min, 1.5 h, 20 h, 5 d. */
export function span(seconds) {
  const number = Math.max(0, Math.round(seconds));
  if (number < 90) return `${number} s`;
  if (number < 3570) return `${Math.round(number / 60)} min`;
  if (number < 36000) return `${Math.round(number / 360) / 10} h`;
  if (number < 129600) return `${Math.round(number / 3600)} h`;
  return `${Math.round(number / 86400)} d`;
}

export function ago(time, now) {
  const at = typeof time === "number" ? time : Date.parse(time) / 1000;
  return Number.isFinite(at) ? span(now - at) : t("unknown");
}

/** An absolute time for tooltips, in the reader's own zone. */
export function clock(time) {
  const at = new Date(typeof time === "number" ? time * 1000 : time);
  return Number.isNaN(at.getTime()) ? "" : at.toLocaleString(document.documentElement.lang);
}

/** The time of day in the reader's own zone. */
export function timeOfDay(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString(document.documentElement.lang, { hour: "2-digit", minute: "2-digit" });
}

const formats = new Map(); // by language: making one takes longer than using it a hundred times

export function count(number) {
  if (!formats.has(language)) formats.set(language, new Intl.NumberFormat(document.documentElement.lang));
  return formats.get(language).format(number);
}

export const BY_NAME = new Intl.Collator("en", { numeric: true }); // making one for each comparison takes most of the time

/** MiB in people's words. */
export function mib(number) {
  if (number === null || number === undefined) return t("unknown");
  if (number < 1024) return `${Math.round(number)} MiB`;
  const gib = number / 1024;
  if (gib >= 10240) return `${(gib / 1024).toFixed(1)} TiB`;
  return `${gib < 10 ? gib.toFixed(1) : Math.round(gib)} GiB`;
}
